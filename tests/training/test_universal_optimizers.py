"""Checkpoints of Adagrad, SGD and RMSprop, universal or not, resume on any number of processes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import CheckpointError
from tests.helpers import reference
from tests.helpers.damage import flip_bit_behind
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import assert_same_tensors, convert_by_command, tensors
from tests.training.test_parity import LOSS_TOLERANCE, MASTER_TOLERANCE
from tests.training.test_stock_checkpoint import Look
from tests.training.worker import Outcome, Recorder, Run, launch, train

pytestmark = (
    pytest.mark.long
)  # tests/training/test_universal.py has AdamW, test_resharding.py the way without a conversion

# The recipe has parameters smaller than the number of ranks, a frozen one, and one that some steps do not use.
BASE = Recipe(groups=True, scheduler="step", skip_side_at=(1, 2, 4), frozen=True, odd=True, depth=1, max_steps=6)
SGD = dataclasses.replace(BASE, optimizer="SGD", lr=0.1, eps=None)
RECIPES = {
    "Adagrad": dataclasses.replace(
        BASE, optimizer="Adagrad", optimizer_kwargs={"lr_decay": 0.1, "initial_accumulator_value": 0.01}
    ),
    "SGD": dataclasses.replace(SGD, precision="bf16-mixed", optimizer_kwargs={"momentum": 0.9, "dampening": 0.2}),
    "SGD without momentum": SGD,
    "RMSprop": dataclasses.replace(BASE, optimizer="RMSprop", optimizer_kwargs={"centered": True}),
}
ARRAYS = {
    "Adagrad": {"fp32", "sum"},
    "SGD": {"fp32", "momentum_buffer"},
    "SGD without momentum": {"fp32"},
    "RMSprop": {"fp32", "square_avg", "grad_avg"},
}
SAVE_AT = 3


@dataclasses.dataclass(frozen=True)
class Known:
    """The results of one recipe: uninterrupted, converted to universal checkpoints, and resumed on two processes."""

    losses: list[float]
    recorder: Recorder
    one: Path
    two: Path
    on_two: Outcome


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    """Train every recipe on one process, save it on two, and continue it there from the ordinary checkpoint."""
    root = tmp_path_factory.mktemp("universal")
    straight, one = {}, {}
    for name, recipe in RECIPES.items():
        straight[name] = train(Run(out=str(root / name), recipe=recipe, save_at=(SAVE_AT,)))
        one[name] = convert_by_command(root / name / f"step-{SAVE_AT}.ckpt")
    passing = [passing_through(root / name / "two", name, one[name], 2, 3000) for name in RECIPES]
    on = [
        Run(out=str(root / name / "on"), recipe=recipe, devices=2, resume=str(root / name / f"step-{SAVE_AT}.ckpt"))
        for name, recipe in RECIPES.items()
    ]
    outcomes = dict(zip(RECIPES, launch(*passing, *on)[len(passing) :], strict=True))
    two = {name: convert_by_command(root / name / "two" / "saved.ckpt") for name in RECIPES}
    return {
        name: Known(module.losses, recorder, one[name], two[name], outcomes[name])
        for name, (module, _, recorder) in straight.items()
    }


def passing_through(root: Path, name: str, universal: Path, devices: int, sub_group_size: int) -> Run:
    """Return a run that loads and saves before any step, with a sub-group size and a ring of its own."""
    return Run(
        out=str(root),
        recipe=dataclasses.replace(RECIPES[name], max_steps=SAVE_AT),
        devices=devices,
        resume=str(universal),
        save_after_fit=str(root / "saved.ckpt"),
        transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 3},
        options={"zero": {"sub_group_size": sub_group_size}},
    )


@pytest.mark.long
def test_state_survives_other_numbers_of_processes_to_the_bit(known: dict[str, Known], tmp_path: Path) -> None:
    """Passing from one process to two, three and one again gives the bits of an uninterrupted run."""
    launch(*(passing_through(tmp_path / name, name, known[name].two, 3, 10**9) for name in RECIPES))
    for name, recipe in RECIPES.items():
        three = convert_by_command(tmp_path / name / "saved.ckpt")
        straight = known[name]
        assert {array.rpartition("/")[2] for array in tensors(straight.one)} == ARRAYS[name]
        assert_same_tensors(straight.one, straight.two)
        assert_same_tensors(straight.one, three)
        module, _, recorder = train(Run(out=str(tmp_path / "back" / name), recipe=recipe, resume=str(three)))
        assert module.losses == straight.losses[SAVE_AT:]
        for key in ("steps", "lr"):
            assert recorder.extra[key] == straight.recorder.extra[key], (name, key)
        for parameter, master in straight.recorder.masters.items():
            assert torch.equal(recorder.masters[parameter], master), (name, parameter)


@pytest.mark.parametrize("name", RECIPES)
def test_training_goes_on_at_another_number_of_processes_as_in_torch(name: str, known: dict[str, Known]) -> None:
    """Three steps on one process and three on two give the losses and masters of torch with the same batches."""
    recipe, outcome = RECIPES[name], known[name].on_two
    expected = reference.train(recipe, world_size=lambda step: 1 if step < SAVE_AT else 2)
    kind = recipe.precision.split("-")[0]
    losses, theirs = torch.tensor(outcome.losses), torch.tensor(expected.losses[SAVE_AT:])
    torch.testing.assert_close(losses, theirs, atol=LOSS_TOLERANCE[kind], rtol=0)
    for parameter, master in expected.masters.items():
        torch.testing.assert_close(outcome.masters[parameter], master, atol=MASTER_TOLERANCE[kind], rtol=0)


TINY = {name: dataclasses.replace(RECIPES[name], precision="32-true", max_steps=2) for name in ("Adagrad", "SGD")}
TINY["AdamW"] = dataclasses.replace(BASE, max_steps=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return universal checkpoints of one process by optimizer."""
    folder = tmp_path_factory.mktemp("tiny")
    for name, recipe in TINY.items():
        train(Run(out=str(folder / name), recipe=recipe, save_after_fit=str(folder / f"{name}.ckpt")))
    return {name: convert_by_command(folder / f"{name}.ckpt") for name in TINY}


def fit_from(universal: Path, root: Path, module: LitTiny | str, *callbacks: Any) -> None:
    if isinstance(module, str):
        module = LitTiny(TINY[module])
    trainer = quiet_trainer(root, precision="32-true", max_steps=4, callbacks=list(callbacks))
    trainer.fit(module, ckpt_path=universal)


@pytest.mark.parametrize(("saved", "wanted"), [("SGD", "Adagrad"), ("Adagrad", "SGD"), ("AdamW", "SGD")])
def test_another_optimizer_is_refused(saved: str, wanted: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """The error names the saved optimizer, or the differing settings of its groups if stock saved no name."""
    with pytest.raises(CheckpointError, match=f"saved with {saved}, the model is configured with {wanted}"):
        fit_from(tiny[saved], tmp_path, wanted)
    with pytest.raises(CheckpointError, match=f"has the settings .* it is not {wanted}"):
        fit_from(without_our_words(tiny[saved], tmp_path / "stock"), tmp_path, wanted)


def without_our_words(universal: Path, copy: Path, *, arrays: bool = True) -> Path:
    """Copy a checkpoint as stock DeepSpeed would save it; without arrays it is one from before the first step."""
    shutil.copytree(universal, copy)
    file = copy / "zero" / "optimizer_state.pt"
    state = torch.load(file, weights_only=False)
    del state["smart_infinity"]
    if not arrays:
        state["optimizer_state_dict"]["state"] = {}
    torch.save(state, file)
    return copy


def test_arrays_of_another_optimizer_are_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Arrays of another optimizer are refused even if the optimizer's name fits."""
    copy = shutil.copytree(tiny["Adagrad"], tmp_path / "copy")
    file = copy / "zero" / "optimizer_state.pt"
    state = torch.load(file, weights_only=False)
    for of_group in state["optimizer_state_dict"]["state"].values():
        of_group["momentum_buffer"] = of_group.pop("sum")
    torch.save(state, file)
    with pytest.raises(CheckpointError, match="holds momentum_buffer, Adagrad keeps sum"):
        fit_from(copy, tmp_path, "Adagrad")


def test_what_was_saved_before_the_first_step_begins_anew(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Stock saves no state before the first step. Sums then take Adagrad's initial value, and no step is counted."""
    look = Look()
    fit_from(without_our_words(tiny["Adagrad"], tmp_path / "stock", arrays=False), tmp_path, "Adagrad", look)
    masters, sums = look.arrays
    assert (sums == 0.01).all() and masters.any() and not any(look.steps)


def test_a_missing_array_is_named(tiny: dict[str, Path], tmp_path: Path) -> None:
    """The error is raised before anything is loaded: every parameter keeps its own value."""
    copy = shutil.copytree(tiny["Adagrad"], tmp_path / "copy")
    (copy / "zero/model.norm.bias/sum.pt").unlink()
    module = LitTiny(TINY["Adagrad"])
    with pytest.raises(CheckpointError, match=r"no file .*norm\.bias/sum\.pt"):
        fit_from(copy, tmp_path, module)
    expected = dict(TINY["Adagrad"].build_model().named_parameters())
    for name, param in module.model.named_parameters():
        assert torch.equal(param.ds_tensor, expected[name].detach().flatten()), name


def test_a_damaged_array_is_named(tiny: dict[str, Path], tmp_path: Path) -> None:
    """One flipped bit is enough for the error."""
    copy = shutil.copytree(tiny["SGD"], tmp_path / "copy")
    file = copy / "zero/model.norm.bias/momentum_buffer.pt"
    flip_bit_behind(torch.load(file).numpy().tobytes()[:32], file)
    with pytest.raises(CheckpointError, match=r"norm\.bias/momentum_buffer\.pt is damaged"):
        fit_from(copy, tmp_path, "SGD")
