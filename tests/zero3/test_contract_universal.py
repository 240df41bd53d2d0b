"""The private seams of the installed DeepSpeed that universal checkpoints stand on."""

from __future__ import annotations

import inspect
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.helpers.universal import convert, tensors

SHAPES = [OrderedDict(a=torch.Size([3]), b=torch.Size([2, 2])), OrderedDict(c=torch.Size([1]))]
WHOLE = {"a": torch.arange(3.0), "b": 10 + torch.arange(4.0), "c": torch.tensor([20.0])}


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted from what two processes save: sub-groups by their number, slices padded to one length."""
    checkpoint = tmp_path_factory.mktemp("two") / "two.ckpt"
    (folder := checkpoint / "checkpoint").mkdir(parents=True)
    for rank in range(2):
        masters = [torch.cat([_slice(WHOLE[name], rank) for name in names]) for names in SHAPES]
        state = {
            index: {"exp_avg": 100 + master, "exp_avg_sq": 200 + master, "step": torch.tensor(7.0)}
            for index, master in enumerate(masters)
        }
        optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
        of_zero = {
            "zero_stage": 3,
            "partition_count": 2,
            "fp32_flat_groups": masters,
            "optimizer_state_dict": optimizer,
            "ours": rank,
        }
        torch.save({"optimizer_state_dict": of_zero}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model_states = {"param_shapes": SHAPES, "dp_world_size": 2, "module": {}, "of_user": rank}
        torch.save(model_states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return convert(checkpoint)


def _slice(values: torch.Tensor, rank: int) -> torch.Tensor:
    numel = -(-len(values) // 2)
    part = values[rank * numel : (rank + 1) * numel]
    return torch.nn.functional.pad(part, (0, numel - len(part)), value=-1)


def test_converter_makes_flat_tensors_of_what_our_checkpoints_hold(universal: Path) -> None:
    """Per parameter one file for each array, without padding (zero3/universal_folder.py)."""
    expected = {
        f"{name}/{array}": values + offset
        for name, values in WHOLE.items()
        for array, offset in {"fp32": 0, "exp_avg": 100, "exp_avg_sq": 200}.items()
    }
    converted = tensors(universal)
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(converted[name].flatten(), values), name


def test_converter_keeps_the_states_that_are_read(universal: Path) -> None:
    """The first rank's optimizer state as a whole, and every rank's model states as they were."""
    state = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    assert (state["ours"], state["optimizer_state_dict"]["param_groups"][0]["lr"]) == (0, 0.5)
    assert int(state["optimizer_state_dict"]["state"][0]["step"]) == 7
    for rank in range(2):
        states = torch.load(universal / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights_only=False)
        assert (states["of_user"], states["param_shapes"]) == (rank, SHAPES)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_get_zero_param_shapes", ["self"]),
        ("_get_zero_frozen_param_attributes", ["self", "attr_func"]),
        ("_get_param_shape_func", ["self", "param"]),
    ],
)
def test_engine_describes_its_parameters(name: str, parameters: list[str]) -> None:
    """Shapes of trained and frozen parameters by name, as checkpoints hold them."""
    assert list(inspect.signature(getattr(DeepSpeedEngine, name)).parameters) == parameters


def test_engine_loads_buffers_and_frozen_fragments() -> None:
    """The engine's own method takes what is left of a checkpoint beside masters and moments."""
    module = torch.nn.BatchNorm1d(2)
    weight: Any = module.weight
    weight.requires_grad_(False)
    weight.ds_id, weight.ds_tensor = 0, torch.zeros(2)
    engine = mock.MagicMock(module=module, param_names={weight: "weight"})
    saved = {**module.state_dict(), "running_mean": torch.tensor([3.0, 4.0])}
    checkpoint = {"module": saved, "frozen_param_fragments": {"weight": torch.tensor([5.0, 6.0])}}
    DeepSpeedEngine.load_module_state_dict(engine, checkpoint=checkpoint, strict=True)
    assert module.running_mean is not None and module.running_mean.tolist() == [3.0, 4.0]
    assert weight.ds_tensor.tolist() == [5.0, 6.0], "zero3/universal.py hands frozen slices over so"
