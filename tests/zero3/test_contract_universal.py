"""Tests the private seams of the installed DeepSpeed that universal checkpoints rely on."""

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

from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import CHECKSUMMED
from tests.helpers.universal import assert_same_tensors, convert, convert_by_command, save_of_two, tensors

SHAPES = [OrderedDict(a=torch.Size([3]), b=torch.Size([2, 2])), OrderedDict(c=torch.Size([1]))]
WHOLE = {"a": torch.arange(3.0), "b": 10 + torch.arange(4.0), "c": torch.tensor([20.0])}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes, with numbered sub-groups and slices padded to one length."""
    return save_of_two(tmp_path_factory.mktemp("two") / "two.ckpt", SHAPES, WHOLE, {"exp_avg": 100, "exp_avg_sq": 200})


@pytest.fixture(scope="module")
def universal(checkpoint: Path) -> Path:
    """The universal checkpoint that DeepSpeed's converter makes of it."""
    return convert(checkpoint)


@pytest.mark.seam("convert_checkpoint writes them for optimizers that the converter does not know")
def test_ours_makes_the_same(checkpoint: Path, universal: Path, tmp_path: Path) -> None:
    """``smart-infinity universal`` writes the files and keys that DeepSpeed's converter writes, and checksums."""
    ours = convert_by_command(checkpoint, tmp_path / "ours")
    assert_same_tensors(ours, universal)
    files = [{str(file.relative_to(folder)) for file in folder.rglob("*.pt")} for folder in (ours, universal)]
    assert files[0] == files[1] | {"zero/crc32c.pt"}
    states = [torch.load(folder / "zero/optimizer_state.pt", weights_only=False) for folder in (ours, universal)]
    assert states[0].keys() == states[1].keys() | {CHECKSUMMED}
    assert states[0]["param_groups"] == states[1]["param_groups"]
    of_optimizer = [state["optimizer_state_dict"]["state"] for state in states]
    assert [of_group.keys() for of_group in of_optimizer[0].values()] == [
        of_group.keys() for of_group in of_optimizer[1].values()
    ]


@pytest.mark.seam("`write_arrays` saves what it reads")
def test_converter_makes_flat_tensors_of_what_our_checkpoints_hold(universal: Path) -> None:
    """ds_to_universal writes one file per parameter and array, without padding."""
    expected = {
        f"{name}/{array}": values + offset
        for name, values in WHOLE.items()
        for array, offset in {"fp32": 0, "exp_avg": 100, "exp_avg_sq": 200}.items()
    }
    converted = tensors(universal)
    assert converted.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(converted[name].flatten(), values), name


@pytest.mark.seam("`UniversalFolder` reads universal checkpoints")
def test_converter_keeps_the_states_that_are_read(universal: Path) -> None:
    """deepspeed.checkpoint.ds_to_universal keeps the first rank's optimizer state and every rank's model states."""
    state = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    assert (state["ours"], state["optimizer_state_dict"]["param_groups"][0]["lr"]) == (0, 0.5)
    assert int(state["optimizer_state_dict"]["state"][0]["step"]) == 7
    for rank in range(2):
        states = torch.load(universal / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights_only=False)
        assert (states["of_user"], states["param_shapes"]) == (rank, SHAPES)


@pytest.mark.seam("comparing a checkpoint of another number of processes with the model")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_get_zero_param_shapes", ["self"]),
        ("_get_zero_frozen_param_attributes", ["self", "attr_func"]),
        ("_get_param_shape_func", ["self", "param"]),
    ],
)
def test_engine_describes_its_parameters(name: str, parameters: list[str]) -> None:
    """DeepSpeedEngine: _get_zero_param_shapes, _get_zero_frozen_param_attributes, _get_param_shape_func."""
    assert list(inspect.signature(getattr(DeepSpeedEngine, name)).parameters) == parameters


@pytest.mark.seam("load_resharded and load_saved_weights load buffers and frozen parameters")
def test_engine_loads_buffers_and_frozen_fragments() -> None:
    """DeepSpeedEngine.load_module_state_dict loads what a checkpoint holds beside masters and moments."""
    module = torch.nn.BatchNorm1d(2)
    weight: Any = module.weight
    weight.requires_grad_(False)
    weight.ds_id, weight.ds_tensor = 0, torch.zeros(2)
    engine = mock.MagicMock(module=module, param_names={weight: "weight"})
    saved = {**module.state_dict(), "running_mean": torch.tensor([3.0, 4.0])}

    class ReadWhenAskedFor:
        def __getitem__(self, name: str) -> torch.Tensor:
            assert name == "weight"
            return torch.tensor([5.0, 6.0])

    checkpoint = {"module": saved, "frozen_param_fragments": ReadWhenAskedFor()}
    DeepSpeedEngine.load_module_state_dict(engine, checkpoint=checkpoint, strict=True)
    assert module.running_mean is not None and module.running_mean.tolist() == [3.0, 4.0]
    assert weight.ds_tensor.tolist() == [5.0, 6.0], "load/resharding.py hands frozen slices over so"
