"""Ordinary checkpoints resume on any number of processes, however many saved them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import run_module
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import assert_same_tensors, convert_by_command
from tests.training.test_checkpoint import MISFITS, TINY, assert_misfit, assert_refused, flip, flip_after_check
from tests.training.worker import Outcome, Run, launch, train

BASE = Recipe(groups=True, frozen=True, odd=True, scheduler="step", clip=0.5, skip_side_at=(1, 2, 4), max_steps=6)
FP16 = dataclasses.replace(BASE, precision="16-mixed")
OPTIONS = {"initial_scale_power": 22, "hysteresis": 1}
ON_STORAGE = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0, "sub_group_size": 3000}
SAVE_AT = 3


def passed_on(root: Path, recipe: Recipe, options: dict[str, Any]) -> tuple[Run, Path]:
    """Train on one process, and pass what step 3 has saved to two and three processes and one again.

    Every stage loads and saves before any step, with sub-groups and a ring of its own. The last one goes on, with
    parameters on storage, and has to equal the first. What the stages save is compared as universal checkpoints.

    Returns:
        The first run, and the checkpoint that two processes saved.
    """
    first = Run(out=str(root / "1"), recipe=recipe, options=options, save_at=(SAVE_AT,))
    straight, _, straight_recorder = train(first)
    if recipe.precision == "16-mixed":
        assert straight_recorder.skipped, "no step overflowed"
    saved = [root / "1" / f"step-{SAVE_AT}.ckpt"]
    for devices, sub_group_size in ((2, 3000), (3, 10**9)):
        passing = Run(
            out=str(root / str(devices)),
            recipe=dataclasses.replace(recipe, max_steps=SAVE_AT),
            devices=devices,
            resume=str(saved[-1]),
            save_after_fit=str(root / f"from-{devices}.ckpt"),
            transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 3},
            options={**options, "zero": {"sub_group_size": sub_group_size}},
        )
        (outcome,) = launch(passing)
        assert outcome.output.count("random states are not restored") == 1
        saved.append(root / f"from-{devices}.ckpt")
    universal = [convert_by_command(path) for path in saved]
    for other in universal[1:]:
        assert_same_tensors(universal[0], other)
    back, _, back_recorder = train(
        Run(out=str(root / "back"), recipe=recipe, options={**options, "zero": ON_STORAGE}, resume=str(saved[-1]))
    )
    assert back.losses == straight.losses[SAVE_AT:]
    for key in ("steps", "loss_scale", "lr"):
        assert back_recorder.extra[key] == straight_recorder.extra[key], key
    for name, master in straight_recorder.masters.items():
        assert torch.equal(back_recorder.masters[name], master), name
    return first, saved[1]


def test_state_survives_other_numbers_of_processes_to_the_bit(tmp_path: Path) -> None:
    """Passing from one process to two, three and one again, with other sub-groups and rings, changes no bit.

    The run has groups, a scheduler, a parameter unused for some steps, a frozen one, parameters smaller than the number
    of ranks, and a loss scale that skips the first steps.
    """
    passed_on(tmp_path, FP16, OPTIONS)


LONG = {
    "AdamW": dataclasses.replace(BASE, precision="bf16-mixed"),
    "Adam": dataclasses.replace(BASE, optimizer="Adam"),
    "Adagrad": dataclasses.replace(
        BASE,
        optimizer="Adagrad",
        precision="bf16-true",
        optimizer_kwargs={"lr_decay": 0.1, "initial_accumulator_value": 0.01},
    ),
    "SGD": dataclasses.replace(BASE, optimizer="SGD", lr=0.1, eps=None, optimizer_kwargs={"momentum": 0.9}),
    "RMSprop": dataclasses.replace(
        BASE, optimizer="RMSprop", precision="bf16-mixed", optimizer_kwargs={"centered": True, "momentum": 0.5}
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_every_optimizer_survives_and_goes_on_as_from_a_universal_checkpoint(name: str, tmp_path: Path) -> None:
    """Three processes go on from what two saved with the bits with which they go on from its universal form."""
    first, saved = passed_on(tmp_path, LONG[name], {})
    on = [
        dataclasses.replace(first, out=str(tmp_path / path.name / "on"), devices=3, save_at=(), resume=str(path))
        for path in (saved, convert_by_command(saved, tmp_path / "universal"))
    ]
    assert_equal(*launch(*on))


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.losses == expected.losses and len(outcome.losses) == LONG["AdamW"].max_steps - SAVE_AT
    assert outcome.extra["steps"] == expected.extra["steps"]
    for name, master in expected.masters.items():
        assert torch.equal(outcome.masters[name], master), name


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that two processes saved."""
    folder = tmp_path_factory.mktemp("two")
    launch(Run(out=str(folder), recipe=TINY, devices=2, save_after_fit=str(folder / "two.ckpt")))
    return folder / "two.ckpt"


def file_of(checkpoint: Path, rank: int, kind: str = "optim") -> Path:
    (file,) = (checkpoint / "checkpoint").glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    return file


def exchange(checkpoint: Path, kind: str) -> None:
    first, second = (file_of(checkpoint, rank, kind) for rank in range(2))
    between = first.with_name("between")
    first.rename(between)
    second.rename(first)
    between.rename(second)


def add_a_process(checkpoint: Path) -> None:
    file = file_of(checkpoint, 1)
    shutil.copy(file, file.with_name(file.name.replace("rank_1_mp", "rank_2_mp")))


# test_zero_folder.py has files that do not belong together.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of an array": (lambda c: flip(file_of(c, 1)), r"rank_1_.*optim_states\.pt is damaged: the checksum"),
    "cut short": (lambda c: file_of(c, 1).write_bytes(file_of(c, 1).read_bytes()[:-100]), "rank_1_.*damaged"),
    "optimizer states are missing": (lambda c: file_of(c, 1).unlink(), "of 1 processes, and says that 2 saved it"),
    "optimizer states too many": (add_a_process, "optimizer states of 3 processes; 2 saved"),
    "model states are missing": (lambda c: file_of(c, 1, "model").unlink(), "model states of 1 processes; 2 saved"),
    "a bit of model states": (lambda c: flip(file_of(c, 1, "model")), r"rank_1_.*model_states\.pt is damaged"),
    "optimizer states exchanged": (lambda c: exchange(c, "optim"), r"rank_0_.*optim_states\.pt was saved by rank 1"),
    "model states exchanged": (lambda c: exchange(c, "model"), r"rank_0_.*model_states\.pt was saved by rank 1"),
    "not whole": (lambda c: (c / "latest").unlink(), "no file 'latest'"),
}

USUAL = (
    "a bit of an array",
    "optimizer states are missing",
    "a bit of model states",
    "optimizer states exchanged",
    "optimizer states too many",
)


@pytest.mark.parametrize("name", long_but(USUAL, DAMAGES))
def test_a_damaged_checkpoint_is_refused_and_nothing_is_loaded(
    name: str, two: Path, tmp_path: Path, attack: Attack
) -> None:
    """The error says what is wrong, and parameters keep the model's own values."""
    attack(
        "damage in a checkpoint of another number of processes",
        tries=1,
        outcome="CheckpointError, and nothing is loaded",
    )
    damage, named = DAMAGES[name]
    folder = shutil.copytree(two, tmp_path / "copy")
    damage(folder)
    assert_refused(folder, tmp_path, named)


def test_a_value_that_is_read_wrongly_when_it_is_loaded(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    """A load compares what it reads with the checksums that it found when it verified the whole file."""
    attack("bit flip in a checkpoint between check and load", tries=1, outcome="CheckpointError")
    folder = shutil.copytree(two, tmp_path / "copy")
    flip_after_check(ZeroFolder, file_of(folder, 1), monkeypatch)
    with pytest.raises(CheckpointError, match=r"rank_1_.*optim_states\.pt is damaged: the checksum of a block"):
        quiet_trainer(tmp_path, precision="32-true", max_steps=4).fit(LitTiny(TINY), ckpt_path=folder)


@pytest.mark.parametrize(
    "name", long_but(["another precision", "another optimizer", "another shape", "a parameter less"], MISFITS)
)
def test_a_checkpoint_that_does_not_fit_is_refused(name: str, two: Path, tmp_path: Path) -> None:
    """The error names the first difference."""
    changes, named = MISFITS[name]
    assert_misfit(two, tmp_path, changes, "was saved without bf16" if "precision" in changes else named)


def test_every_rank_raises_what_one_has_found(two: Path, tmp_path: Path) -> None:
    """The rank that verifies a damaged array names it, and the others raise the same."""
    folder = shutil.copytree(two, tmp_path / "copy")
    flip(file_of(folder, 1))
    run = Run(out=str(tmp_path), recipe=TINY, devices=3, resume=str(folder))
    (tmp_path / "runs.json").write_text(json.dumps([dataclasses.asdict(run)]))
    done = run_module("tests.training.worker", tmp_path / "runs.json", ranks=3)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("is wrong. It comes from rank") >= 3
