"""Training resumes from checkpoints that stock DeepSpeed saved with its state in memory."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import shutil
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.fabric.strategies.deepspeed import (
    DeepSpeedStrategy as FabricDeepSpeedStrategy,
    _validate_checkpoint_directory,
)
from lightning.pytorch.strategies import DeepSpeedStrategy
from safetensors.torch import load_file

from lightning_smartinfinity import CheckpointError, ConfigError, SmartInfinityFabricStrategy, SmartInfinityStrategy
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.integrations.fabric.strategy import FabricOptions
from lightning_smartinfinity.integrations.trainer.strategy import LightningOptions
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import FoundCheckpoint
from tests.fabric.worker import quiet_fabric
from tests.helpers import trainers
from tests.helpers.assertions import assert_equal, refused
from tests.helpers.hostile import assert_plain, files_in
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import run_module
from tests.helpers.universal import convert, convert_by_command
from tests.stock.checkpoint_worker import KINDS, NUM_STEPS, SAVE_AT
from tests.training.test_parity import LOSS_TOLERANCE

TORCH_DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints that stock DeepSpeed saved in a process of its own."""
    folder = tmp_path_factory.mktemp("stock")
    done = run_module("tests.stock.checkpoint_worker", folder, "1")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def optimizer_state(checkpoint: Path) -> dict[str, Any]:
    (file,) = checkpoint.rglob("*optim_states.pt")
    return torch.load(file, weights_only=False)["optimizer_state_dict"]  # type: ignore[no-any-return]


def saved_arrays(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the masters and the optimizer's arrays, flat."""
    of_groups = state["optimizer_state_dict"]["state"]
    names = [name for name in of_groups.get(0, {}) if name != "step"]
    arrays = ([of_groups[i][name] for i in range(len(of_groups))] for name in names)
    return [torch.cat(tensors) for tensors in (state["fp32_flat_groups"], *arrays)]


class Look(pl.Callback):
    """A callback that keeps the loaded state before the first step."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        optimizer: Any = trainer.strategy.optimizers[0]
        self.arrays, self.steps = arrays_and_steps(optimizer)
        self.partition = torch.cat(optimizer.fp16_partitioned_groups_flat).clone()
        self.parameters = optimizer.partition.layout.parameters
        self.loss_scale = float(optimizer.loss_scale)
        self.lr = [group["lr"] for group in optimizer.param_groups]


def arrays_and_steps(optimizer: Any) -> tuple[list[torch.Tensor], set[int]]:
    """Return the flat arrays of an optimizer's state, and the numbers of its updates."""
    arrays = [torch.empty(optimizer.partition.layout.numel) for _ in optimizer.rule.arrays]
    handler = optimizer.update.drained_handler()

    def copy(window: Any) -> None:
        for array, values in zip(arrays, window.arrays, strict=True):
            array[window.begin : window.end] = torch.from_numpy(values)

    handler.state.scan(copy)
    return arrays, set(handler.steps.tolist())


def resume(
    root: Path, recipe: Recipe, checkpoint: Path, *callbacks: pl.Callback, weights_only: bool | None = False
) -> LitTiny:
    module = LitTiny(recipe)
    trainer = trainers.quiet_trainer(
        root, precision=recipe.precision, max_steps=NUM_STEPS, callbacks=list(callbacks), transfer={"num_buffers": 2}
    )
    trainer.fit(module, ckpt_path=checkpoint, weights_only=weights_only)
    return module


WAYS: dict[str, Callable[[Path, Path], Path]] = {
    "as it is": lambda checkpoint, new: checkpoint,
    "resharded": lambda checkpoint, new: checkpoint,
    "universal": lambda checkpoint, new: convert_by_command(checkpoint, new, "--no-weights-only"),
    "universal, by DeepSpeed": lambda checkpoint, new: convert(shutil.copytree(checkpoint, new)),
}
CASES = [
    *((kind, "as it is") for kind in KINDS),
    *((kind, "universal") for kind in ("fp32", "fp16", "adagrad", "sgd", "sgd without momentum")),
    *((kind, "resharded") for kind in ("adagrad", "sgd without momentum", "fp16")),
    ("bf16-offload", "universal, by DeepSpeed"),
]
USUAL = [
    ("adagrad", "as it is"),
    ("fp16", "universal"),
    ("sgd", "universal"),
    ("fp16", "resharded"),
    ("bf16-offload", "universal, by DeepSpeed"),
]


@pytest.mark.parametrize(("kind", "way"), long_but(USUAL, CASES))
def test_a_stock_checkpoint_is_resumed(
    kind: str, way: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays, steps, loss scale and learning rates equal stock's bit for bit, and training then gives its losses.

    torch's SGD keeps no number of updates. The count becomes one if it has a momentum buffer, and zero if it has none.
    What our command has converted holds no objects of DeepSpeed's, and needs no consent.
    """
    recipe, look, checkpoint = KINDS[kind][0], Look(), WAYS[way](saved / f"{kind}.ckpt", tmp_path / "new")
    if way == "resharded":
        monkeypatch.setattr(FoundCheckpoint, "is_of_as_many", False)
    if way == "universal":
        assert_plain(files_in(checkpoint), 10)
    module = resume(tmp_path, recipe, checkpoint, look, weights_only=None if way == "universal" else False)
    state = optimizer_state(saved / f"{kind}.ckpt")
    groups = state["optimizer_state_dict"]
    expected = saved_arrays(state)
    for array, values in zip_longest(look.arrays, expected, fillvalue=torch.zeros(len(look.partition))):
        assert torch.equal(array, values)
    assert (
        torch.equal(look.partition, expected[0].to(look.partition.dtype))
        and look.steps == {int(groups["state"][0].get("step", 1)) if groups["state"] else 0}
        and look.loss_scale == state["loss_scaler"].cur_scale
        and look.lr == [group["lr"] for group in groups["param_groups"]]
    )
    losses = json.loads((saved / f"{kind}.json").read_text())
    tolerance = LOSS_TOLERANCE[recipe.precision.split("-")[0]]
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(losses[SAVE_AT:]), atol=tolerance, rtol=0)


# What DeepSpeed's engine saved without Lightning is fp32.engine/latest and fp32.engine/global_step3/.
@pytest.mark.parametrize(
    ("kind", "name"),
    [("fp32", "fp32.engine"), ("bf16-offload", "bf16-offload.ckpt"), ("fp16", "fp16.ckpt")],
    ids=lambda value: value.replace(".", " "),
)
def test_a_stock_checkpoint_is_evaluated(kind: str, name: str, saved: Path, tmp_path: Path) -> None:
    """Every parameter equals the output of DeepSpeed's converter, also if no Trainer wrote the checkpoint."""
    module = LitTiny(dataclasses.replace(KINDS[kind][0], validate=True))
    trainer = trainers.quiet_trainer(tmp_path, precision=module.recipe.precision)
    trainer.validate(module, ckpt_path=saved / name, verbose=False, weights_only=False)
    expected = get_fp32_state_dict_from_zero_checkpoint(str(saved / f"{kind}.ckpt"))
    for key, param in module.named_parameters(remove_duplicate=False):
        assert torch.equal(param.ds_tensor, expected[key].flatten().to(param.dtype)), key


@pytest.mark.parametrize("kind", long_but(["fp32", "bf16-offload", "fp16"], KINDS))
def test_a_stock_checkpoint_is_exported(kind: str, saved: Path, tmp_path: Path) -> None:
    """The export has the masters that DeepSpeed's own script finds, and rounds them to the dtype of the training."""
    checkpoint = saved / f"{kind}.ckpt"
    masters = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    trained_in = TORCH_DTYPES[KINDS[kind][0].precision]
    for name, dtype in {None: trained_in, "fp32": torch.float32}.items():
        export_checkpoint(checkpoint, tmp_path / f"{name}", ExportSettings(dtype=name, weights_only=False))
        found = load_file(tmp_path / f"{name}" / "model.safetensors")
        assert masters.keys() - found.keys() == {"model.head.weight"}  # tied to the tokens' weight
        assert all(torch.equal(value, masters[key].to(value.dtype)) for key, value in found.items())
        assert {found[key].dtype for key, _ in LitTiny(KINDS[kind][0]).named_parameters()} == {dtype}


@pytest.mark.parametrize("inside", ["", f"global_step{SAVE_AT}"])
def test_fabric_goes_on_from_what_an_engine_saved(inside: str, saved: Path, tmp_path: Path) -> None:
    """Masters, moments and step counts equal stock's bit for bit. A tag's folder can also be named."""
    fabric = quiet_fabric(tmp_path / "storage")
    module = LitTiny(KINDS["fp32"][0])
    model, optimizer = fabric.setup(module, module.configure_optimizers()["optimizer"])
    path, into = saved / "fp32.engine" / inside, {"model": model, "optimizer": optimizer}
    assert fabric.load(path, into, weights_only=False) == {}
    inner, state = optimizer.engine.optimizer, optimizer_state(saved / "fp32.engine")
    arrays, steps = arrays_and_steps(inner)
    for array, values in zip(arrays, saved_arrays(state), strict=True):
        assert torch.equal(array, values)
    assert steps == {SAVE_AT}


def test_a_trainer_does_not_go_on_from_what_an_engine_saved(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint lacks the Trainer's progress. Lightning's own strategies refuse such a folder, too.

    The error's command writes the masters.
    """
    with pytest.raises(FileNotFoundError, match="not a valid DeepSpeed checkpoint"):
        _validate_checkpoint_directory(saved / "fp32.engine")
    with pytest.raises(CheckpointError, match=r"lacks 'loops', .*saved by DeepSpeed itself") as caught:
        resume(tmp_path, KINDS["fp32"][0], saved / "fp32.engine")
    assert "Fabric" in caught.value.remedy
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(caught.value.remedy.split("`")[1])[1:], "--no-weights-only"]) == 0
    expected = get_fp32_state_dict_from_zero_checkpoint(str(saved / "fp32.ckpt"))
    module = LitTiny(KINDS["fp32"][0])
    module.load_state_dict(load_file("weights/model.safetensors"), strict=False)
    assert_equal(dict(module.named_parameters(remove_duplicate=False)), expected)


def test_a_stock_checkpoint_needs_consent(saved: Path, tmp_path: Path) -> None:
    """DeepSpeed saves objects of its own. The error names their types and what to write, and nothing is loaded."""
    named, remedy = r"LossScaler, deepspeed\.runtime\.zero\.config\.ZeroStageEnum", "weights_only=False to Trainer.fit;"
    with refused(CheckpointError, match=named, remedy=f"pass {remedy}"):
        resume(tmp_path, KINDS["fp32"][0], saved / "fp32.ckpt", weights_only=None)


MISFITS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another precision": ("fp32", {"precision": "16-mixed"}, "without fp16"),
    "bf16 in fp32": ("bf16-offload", {"precision": "32-true"}, "saved in bf16"),
    "another weight decay": ("fp32", {"optimizer": "Adam"}, "decoupled_weight_decay"),
    "another optimizer": ("sgd", {"optimizer": "AdamW", "optimizer_kwargs": {}}, "'nesterov'.*: it is not AdamW"),
    "SGD for Adam": ("fp32", {"optimizer": "SGD", "eps": None}, "it is not SGD"),
    "another model": ("fp32", {"width": 64}, r"parameter 0 is 'model.*of shape"),
    "other parameter groups": ("fp16", {"groups": True}, r"parameter \d+ is 'model"),
}


@pytest.mark.parametrize("name", long_but(["another precision", "another optimizer", "another model"], MISFITS))
def test_a_stock_checkpoint_that_does_not_fit_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """The error names the difference."""
    kind, changes, named = MISFITS[name]
    with pytest.raises(CheckpointError, match=named) as caught:
        resume(tmp_path, dataclasses.replace(KINDS[kind][0], **changes), saved / f"{kind}.ckpt")
    assert caught.value.remedy


def tampered(saved: Path, folder: Path, change: Any, *, kind: str = "fp32") -> Path:
    """Copy a checkpoint and change its optimizer state."""
    copy = shutil.copytree(saved / f"{kind}.ckpt", folder / "changed.ckpt")
    (file,) = copy.rglob("*optim_states.pt")
    content = torch.load(file, weights_only=False)
    change(content["optimizer_state_dict"])
    torch.save(content, file)
    return copy


def without_arrays(state: dict[str, Any]) -> None:
    """Empty the state, as stock does with optimizer state on NVMe."""
    state["fp32_flat_groups"] = [torch.empty(0) for _ in state["fp32_flat_groups"]]
    state["optimizer_state_dict"]["state"] = {}


def without_moments(state: dict[str, Any]) -> None:
    """Rename a moment, as if another optimizer had saved it."""
    for values in state["optimizer_state_dict"]["state"].values():
        values["momentum_buffer"] = values.pop("exp_avg")


@pytest.mark.parametrize(
    ("change", "named"),
    [(without_arrays, "NVMe: masters and moments are not in it"), (without_moments, "momentum_buffer")],
)
def test_a_stock_checkpoint_without_moments_is_refused(change: Any, named: str, saved: Path, tmp_path: Path) -> None:
    """The error says why there is nothing to load."""
    with pytest.raises(CheckpointError, match=named):
        resume(tmp_path, KINDS["fp32"][0], tampered(saved, tmp_path, change))


@pytest.mark.parametrize(("kind", "first"), [("fp32", 0.0), ("adagrad", 0.01)])
def test_a_stock_checkpoint_from_before_the_first_update_is_loaded(
    kind: str, first: float, saved: Path, tmp_path: Path
) -> None:
    """Masters are loaded and all other state starts anew, as in fp16 while every step is skipped."""
    look = Look()
    checkpoint = tampered(saved, tmp_path, lambda state: state["optimizer_state_dict"].update(state={}), kind=kind)
    resume(tmp_path, KINDS[kind][0], checkpoint, look)
    assert torch.equal(look.arrays[0], torch.cat(optimizer_state(checkpoint)["fp32_flat_groups"]))
    real = torch.cat([torch.arange(p.offset, p.offset + p.real_numel) for p in look.parameters])
    for array in look.arrays[1:]:
        assert (array[real] == torch.tensor(first)).all()
    assert look.steps == {0}


# ---- options of Lightning's DeepSpeedStrategy are answered with what does the same here, in one hop


DEFAULTS = {
    name: parameter.default
    for stock in (FabricDeepSpeedStrategy, DeepSpeedStrategy)
    for name, parameter in inspect.signature(stock).parameters.items()
}
REFUSED = sorted(DEFAULTS.keys() - (LightningOptions.__annotations__.keys() & FabricOptions.__annotations__.keys()))
OURS = ((SmartInfinityStrategy, LightningOptions), (SmartInfinityFabricStrategy, FabricOptions))
# What only users of the other class can write.
FOREIGN = {
    SmartInfinityStrategy: ("Fabric", "fabric", "TrainingArguments"),
    SmartInfinityFabricStrategy: ("Trainer", "configure_model", "TrainingArguments"),
}
# Values that people give, where the default is None or switches nothing on.
VALUES: dict[str, Any] = {
    "config": "ds_config.json",
    "cpu_checkpointing": True,
    "offload_optimizer": True,
    "offload_parameters": True,
    "offload_params_device": "nvme",
    "remote_device": "nvme",
}


def value_of(name: str) -> Any:
    return VALUES.get(name, DEFAULTS[name])


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_option_of_stock_deepspeed(name: str) -> None:
    """Each option of the installed class is taken as it is, or answered with what to write instead."""
    for strategy, known in OURS:
        if name in known.__annotations__:
            strategy(**{name: value_of(name)})
            continue
        with pytest.raises(ConfigError) as caught:
            strategy(**{name: value_of(name)})
        assert caught.value.problem == f"{strategy.__name__} has no setting {name!r}."
        assert re.match("Leave it out|Pass|Call", caught.value.remedy), "the option has no answer of its own"
        assert not [word for word in FOREIGN[strategy] if word in caught.value.remedy]
