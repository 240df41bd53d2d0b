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
from tests.training.actions import does
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

ALL_OF_RMSPROP = {"step", "square_avg", "momentum_buffer", "grad_avg"}

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


@pytest.mark.parametrize(
    ("name", "precision", "overlap"),
    [
        ("Adagrad", "32-true", "forward"),
        ("SGD", "bf16-mixed", "backward"),
        ("RMSprop", "bf16-mixed", "forward"),
        pytest.param("SGD without momentum", "32-true", "backward", marks=pytest.mark.long),
        pytest.param("RMSprop without momentum", "32-true", "backward", marks=pytest.mark.long),
    ],
)
def test_overlap_and_resume_change_no_bit(
    name: str, precision: str, overlap: str, straight: Any, tmp_path: Path
) -> None:
    """Speculative updates are kept or rolled back; a resumed run with another ring has the same counts and rates."""
    (expected, expected_masters), checkpoint = straight(name, precision)
    run = run_of(tmp_path / "whole", name, precision, options={"overlap": overlap}, delays=0)
    assert_same(result(run), (expected, expected_masters))
    again = dataclasses.replace(run, out=str(tmp_path / "again"), resume=str(checkpoint), transfer={})
    (losses, _, extra), masters = result(again)
    assert losses == expected[0][2:]
    assert [extra[key] for key in ("steps", "lr")] == [expected[2][key] for key in ("steps", "lr")]
    assert all(torch.equal(masters[parameter], master) for parameter, master in expected_masters.items())


def saved_state(checkpoint: Path) -> dict[int, dict[str, torch.Tensor]]:
    (file,) = checkpoint.rglob("*optim_states.pt")
    content = torch.load(file, weights_only=False)["optimizer_state_dict"]
    return content["optimizer_state_dict"]["state"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("Adagrad", {"step", "sum"}, {"step", "sum"}),
        ("SGD", set(), {"momentum_buffer"}),
        pytest.param("SGD without momentum", set(), set(), marks=pytest.mark.long),
        ("RMSprop", ALL_OF_RMSPROP, ALL_OF_RMSPROP),
        pytest.param("plain RMSprop", {"step", "square_avg"}, {"step", "square_avg"}, marks=pytest.mark.long),
    ],
)
def test_checkpoints_hold_what_torch_keeps(name: str, first: set[str], last: set[str], tmp_path: Path) -> None:
    """A checkpoint uses torch's names, also before the first step, from which training resumes to the same losses.

    DeepSpeed's tool finds the weights in it.
    """
    masters: dict[str, torch.Tensor] = {}

    def save(trainer: pl.Trainer, module: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
        optimizer: Any = trainer.strategy.optimizers[0]
        masters.update((name, optimizer.get_full_hp_param(p).clone()) for name, p in module.model.named_parameters())

    module, again = LitTiny(RECIPES[name]), LitTiny(RECIPES[name])
    fit(module, tmp_path, precision="32-true", callbacks=[does(on_train_start=save, on_train_end=save)])
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "3.ckpt"))
    assert all(torch.equal(weights[f"model.{name}"], master) for name, master in masters.items())
    for step, names in ((0, first), (3, last)):
        found = saved_state(tmp_path / f"{step}.ckpt")
        assert {key for of_group in found.values() for key in of_group} == names, step
    if name == "Adagrad":
        assert all((state["sum"] == 0.01).all() for state in saved_state(tmp_path / "0.ckpt").values())
    quiet_trainer(tmp_path / "again", precision="32-true").fit(again, ckpt_path=tmp_path / "0.ckpt")
    assert again.losses == module.losses


@pytest.mark.parametrize("name", ["Adagrad", "SGD without momentum", "RMSprop without momentum"])
def test_arrays_can_be_read_and_replaced(name: str, tmp_path: Path) -> None:
    """DeepSpeed's functions take torch's names; a momentum buffer that does not exist is an error, as in torch."""
    key = "sum" if name == "Adagrad" else "momentum_buffer"

    def double(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 1:
            weight = module.model.head.weight
            before = safe_get_full_optimizer_state(weight, key)
            safe_set_full_optimizer_state(weight, before * 2, key)
            assert before.any()
            assert torch.equal(safe_get_full_optimizer_state(weight, key), before * 2)

    module, callback = LitTiny(RECIPES[name]), does(on_train_batch_end=double)
    if key == "momentum_buffer":
        with pytest.raises(ConfigError, match=f"{name.split()[0]} has no 'momentum_buffer'") as caught:
            fit(module, tmp_path, precision="32-true", callbacks=[callback])
        assert_helpful(caught.value, "momentum")
    else:
        fit(module, tmp_path, precision="32-true", callbacks=[callback])
        plain = LitTiny(RECIPES[name])
        fit(plain, tmp_path / "plain", precision="32-true")
        assert module.losses[:2] == plain.losses[:2] and module.losses[2:] != plain.losses[2:]


@pytest.mark.parametrize("name", long_but(["centered"], ["momentum", "centered"]))
def test_an_array_that_is_switched_off_survives_a_checkpoint(name: str, tmp_path: Path) -> None:
    """RMSprop's array counts again when its setting returns, in a resumed run as in one that never stopped."""
    checkpoint = tmp_path / "off.ckpt"

    def switch(trainer: pl.Trainer, module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group[name] = 0 if trainer.global_step in (2, 3) else RMSPROP.optimizer_kwargs[name]

    def save(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 3 and not checkpoint.exists():
            trainer.save_checkpoint(checkpoint)

    runs = []
    for resumed in (None, checkpoint):
        module, callback = LitTiny(RMSPROP), does(on_train_batch_start=switch, on_train_batch_end=save)
        trainer = quiet_trainer(tmp_path / str(len(runs)), precision="32-true", max_steps=6, callbacks=[callback])
        trainer.fit(module, ckpt_path=resumed)
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
