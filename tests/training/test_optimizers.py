"""Adagrad, SGD and RMSprop train like torch, with overlap, through checkpoints and with DeepSpeed's functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy, UnsupportedError
from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.test_bad_input import assert_helpful
from tests.training.test_overlap import SMALL_RING, assert_same, result
from tests.training.test_parity import LOSS_TOLERANCE, MASTER_TOLERANCE
from tests.training.worker import Run

# The recipe has what Lightning adds to a step and a parameter that some steps do not use. Clipping makes speculative
# updates wrong.
BASE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4)
ADAGRAD = dataclasses.replace(
    BASE, optimizer="Adagrad", clip=0.3, optimizer_kwargs={"lr_decay": 0.1, "initial_accumulator_value": 0.01}
)
SGD = dataclasses.replace(BASE, optimizer="SGD", lr=0.1, eps=None)
RMSPROP = dataclasses.replace(BASE, optimizer="RMSprop", optimizer_kwargs={"momentum": 0.9, "centered": True})
RECIPES = {
    "Adagrad": ADAGRAD,
    "Adagrad that maximizes": dataclasses.replace(ADAGRAD, lr=1e-4, optimizer_kwargs={"maximize": True}),
    "SGD": dataclasses.replace(SGD, optimizer_kwargs={"momentum": 0.9, "dampening": 0.2}),
    "SGD with nesterov": dataclasses.replace(SGD, optimizer_kwargs={"momentum": 0.9, "nesterov": True}),
    "SGD without momentum": SGD,
    "RMSprop": RMSPROP,
    "RMSprop without momentum": dataclasses.replace(RMSPROP, optimizer_kwargs={"centered": True}),
    "plain RMSprop": dataclasses.replace(RMSPROP, optimizer_kwargs={}),
}
EVERYWHERE = [
    ("Adagrad", "32-true"),
    ("Adagrad", "bf16-mixed"),
    ("SGD", "32-true"),
    ("SGD", "bf16-mixed"),
    ("SGD without momentum", "32-true"),
    ("RMSprop", "32-true"),
    ("RMSprop", "bf16-mixed"),
    ("RMSprop without momentum", "32-true"),
]
# Each rule always runs with one kind of overlap and with one resume; the other pairs, and rules without momentum, take
# long.
OVERLAPPED = long_but(
    [
        ("Adagrad", "32-true", "forward"),
        ("SGD", "bf16-mixed", "backward"),
        ("RMSprop", "bf16-mixed", "forward"),
    ],
    [(*case, overlap) for case in EVERYWHERE for overlap in ("forward", "backward")],
)
RESUMED = [pytest.param(*case, marks=[pytest.mark.long] * (index % 2 == 0)) for index, case in enumerate(EVERYWHERE)]

Result = tuple[Any, dict[str, torch.Tensor]]


def run_of(root: Path, name: str, precision: str, **settings: Any) -> Run:
    """Return a run whose updates take several tasklets."""
    recipe = dataclasses.replace(RECIPES[name], precision=precision)
    return Run(out=str(root), recipe=recipe, transfer=SMALL_RING, **settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Result, Path]]:
    """Return a function that trains a case once without overlap and gives its result and its checkpoint at step 2."""
    known: dict[tuple[str, str], tuple[Result, Path]] = {}

    def trained(name: str, precision: str) -> tuple[Result, Path]:
        if (name, precision) not in known:
            root = tmp_path_factory.mktemp("straight")
            run = run_of(root, name, precision, options={"overlap": "none"}, save_at=(2,))
            known[name, precision] = result(run), root / "step-2.ckpt"
        return known[name, precision]

    return trained


@pytest.mark.parametrize(
    ("name", "precision"),
    long_but(
        [
            ("Adagrad", "32-true"),
            ("SGD", "bf16-mixed"),
            ("RMSprop", "32-true"),
            ("RMSprop", "bf16-mixed"),
            ("SGD with nesterov", "32-true"),
        ],
        [
            *EVERYWHERE,
            ("Adagrad that maximizes", "32-true"),
            ("SGD with nesterov", "32-true"),
            ("plain RMSprop", "32-true"),
        ],
    ),
)
def test_trains_like_torch(name: str, precision: str, straight: Any) -> None:
    """Losses and masters equal torch's, and the state that torch's Adagrad builds at construction is removed."""
    ((losses, _, extra), masters), _ = straight(name, precision)
    expected = reference.train(dataclasses.replace(RECIPES[name], precision=precision))
    kind = precision.split("-")[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), atol=LOSS_TOLERANCE[kind], rtol=0)
    for parameter, master in expected.masters.items():
        torch.testing.assert_close(masters[parameter], master, atol=MASTER_TOLERANCE[kind], rtol=0, msg=parameter)
    assert extra["state_entries"] == 0


@pytest.mark.parametrize(("name", "precision", "overlap"), OVERLAPPED)
def test_overlap_changes_no_bit(name: str, precision: str, overlap: str, straight: Any, tmp_path: Path) -> None:
    """Overlap changes no bit, whether speculative updates are kept or rolled back."""
    run = run_of(tmp_path, name, precision, options={"overlap": overlap}, delays=0)
    assert_same(result(run), straight(name, precision)[0])


@pytest.mark.parametrize(("name", "precision"), RESUMED)
def test_resume_changes_no_bit(name: str, precision: str, straight: Any, tmp_path: Path) -> None:
    """A run resumed with another ring continues with the same losses, masters, counts and learning rates."""
    (expected, expected_masters), checkpoint = straight(name, precision)
    run = dataclasses.replace(run_of(tmp_path, name, precision, resume=str(checkpoint)), transfer={})
    (losses, _, extra), masters = result(run)
    assert losses == expected[0][2:]
    for key in ("steps", "lr"):
        assert extra[key] == expected[2][key], key
    for parameter, master in expected_masters.items():
        assert torch.equal(masters[parameter], master), parameter


def saved_state(checkpoint: Path) -> dict[int, dict[str, torch.Tensor]]:
    (file,) = checkpoint.rglob("*optim_states.pt")
    content = torch.load(file, weights_only=False)["optimizer_state_dict"]
    return content["optimizer_state_dict"]["state"]  # type: ignore[no-any-return]


class Save(pl.Callback):
    """A callback that saves before the first step and after the last."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.masters: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.root / "first.ckpt")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.root / "last.ckpt")
        optimizer: Any = trainer.strategy.optimizers[0]
        self.masters = {name: optimizer.get_full_hp_param(p).clone() for name, p in pl_module.model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("Adagrad", {"step", "sum"}, {"step", "sum"}),
        ("SGD", set(), {"momentum_buffer"}),
        pytest.param("SGD without momentum", set(), set(), marks=pytest.mark.long),
        (
            "RMSprop",
            {"step", "square_avg", "momentum_buffer", "grad_avg"},
            {"step", "square_avg", "momentum_buffer", "grad_avg"},
        ),
        pytest.param(
            "RMSprop without momentum",
            {"step", "square_avg", "grad_avg"},
            {"step", "square_avg", "grad_avg"},
            marks=pytest.mark.long,
        ),
        pytest.param("plain RMSprop", {"step", "square_avg"}, {"step", "square_avg"}, marks=pytest.mark.long),
    ],
)
def test_checkpoints_hold_what_torch_keeps(name: str, first: set[str], last: set[str], tmp_path: Path) -> None:
    """A checkpoint uses torch's names, also before the first step, from which training resumes to the same losses.

    DeepSpeed's tool finds the weights in it.
    """
    module, save = LitTiny(RECIPES[name]), Save(tmp_path)
    fit(module, tmp_path, precision="32-true", callbacks=[save])
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "last.ckpt"))
    assert all(torch.equal(weights[f"model.{name}"], master) for name, master in save.masters.items())
    for file, names in (("first", first), ("last", last)):
        found = saved_state(tmp_path / f"{file}.ckpt")
        assert {key for of_group in found.values() for key in of_group} == names, file
    if name == "Adagrad":
        assert all((state["sum"] == 0.01).all() for state in saved_state(tmp_path / "first.ckpt").values())
    again = LitTiny(RECIPES[name])
    fit_from(again, tmp_path / "again", tmp_path / "first.ckpt")
    assert again.losses == module.losses


def fit_from(module: LitTiny, root: Path, checkpoint: Path) -> None:
    quiet_trainer(root, precision="32-true").fit(module, ckpt_path=checkpoint)


class Doubled(pl.Callback):
    """A callback that doubles one array of a parameter after the first step and reads it back."""

    def __init__(self, key: str) -> None:
        self.key = key

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            weight = pl_module.model.head.weight
            before = safe_get_full_optimizer_state(weight, self.key)
            safe_set_full_optimizer_state(weight, before * 2, self.key)
            assert before.any()
            assert torch.equal(safe_get_full_optimizer_state(weight, self.key), before * 2)


@pytest.mark.parametrize(
    ("name", "key"),
    long_but(
        [("Adagrad", "sum"), ("RMSprop", "grad_avg")],
        [("Adagrad", "sum"), ("SGD", "momentum_buffer"), ("RMSprop", "grad_avg"), ("RMSprop", "square_avg")],
    ),
)
def test_arrays_can_be_read_and_replaced(name: str, key: str, tmp_path: Path) -> None:
    """DeepSpeed's functions take torch's names, and the next step uses the written values."""
    losses = []
    for callbacks in ([], [Doubled(key)]):
        module = LitTiny(RECIPES[name])
        fit(module, tmp_path, precision="32-true", callbacks=callbacks)
        losses.append(module.losses)
    assert losses[0][:2] == losses[1][:2] and losses[0][2:] != losses[1][2:]


@pytest.mark.parametrize(("optimizer", "recipe"), [("SGD", SGD), ("RMSprop", RECIPES["RMSprop without momentum"])])
def test_there_is_no_buffer_without_momentum(optimizer: str, recipe: Recipe, tmp_path: Path) -> None:
    """Reading or writing a momentum buffer that does not exist raises an error, as in torch."""

    class Ask(Doubled):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            with pytest.raises(ConfigError, match=f"{optimizer} has no 'momentum_buffer' of this parameter") as caught:
                super().on_train_batch_end(trainer, pl_module, *args)
            assert_helpful(caught.value, "momentum")
            asked.append(trainer.global_step)
            trainer.should_stop = True

    asked: list[int] = []
    fit(LitTiny(recipe), tmp_path, precision="32-true", callbacks=[Ask("momentum_buffer")])
    assert asked == [1]


class SwitchOff(pl.Callback):
    """A callback that switches a setting off for the third and fourth step, and saves after the third."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        self.name, self.checkpoint = name, checkpoint

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group[self.name] = 0 if trainer.global_step in (2, 3) else RMSPROP.optimizer_kwargs[self.name]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and not self.checkpoint.exists():
            trainer.save_checkpoint(self.checkpoint)


@pytest.mark.parametrize("name", long_but(["centered"], ["momentum", "centered"]))
def test_an_array_that_is_switched_off_survives_a_checkpoint(name: str, tmp_path: Path) -> None:
    """RMSprop's array counts again when its setting returns, in a resumed run as in one that never stopped."""
    runs = []
    for resumed in (False, True):
        module, switch = LitTiny(RMSPROP), SwitchOff(name, tmp_path / "off.ckpt")
        trainer = quiet_trainer(tmp_path / str(resumed), precision="32-true", max_steps=6, callbacks=[switch])
        trainer.fit(module, ckpt_path=tmp_path / "off.ckpt" if resumed else None)
        runs.append(module.losses)
    assert len(runs[0]) == 6 and runs[1] == runs[0][3:]


@pytest.mark.parametrize("name", ["Adagrad", "SGD", "RMSprop"])
def test_formats_that_round_moments_are_refused(name: str, tmp_path: Path) -> None:
    """The error says what to use instead, and nothing is written."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", state_format="bf16")
    with pytest.raises(UnsupportedError) as caught:
        fit(LitTiny(RECIPES[name]), tmp_path, strategy)
    assert_helpful(caught.value, "'bf16'", name, "'fp32'", "AdamW")
    assert not (tmp_path / "storage").exists()
