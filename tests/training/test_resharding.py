"""Ordinary checkpoints resume on any number of processes, however many saved them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models import Recipe
from tests.helpers.universal import assert_same_tensors, convert_by_command
from tests.training.worker import Run, launch, train

BASE = Recipe(groups=True, frozen=True, odd=True, scheduler="step", clip=0.5, skip_side_at=(1, 2, 4), max_steps=6)
FP16 = dataclasses.replace(BASE, precision="16-mixed")
OPTIONS = {"initial_scale_power": 22, "hysteresis": 1}
ON_STORAGE = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0, "sub_group_size": 3000}
SAVE_AT = 3


def passed_on(root: Path, recipe: Recipe, options: dict[str, Any], numbers: tuple[int, ...]) -> tuple[Run, Path]:
    """Train on one process, and pass what step 3 has saved to these numbers of processes and one again.

    Every stage loads and saves before any step, with sub-groups and a ring of its own. The last one goes on, with
    parameters on storage, and has to equal the first. What the stages save is compared as universal checkpoints.

    Returns:
        The first run, and the first checkpoint of those that several processes saved.
    """
    first = Run(out=str(root / "1"), recipe=recipe, options=options, save_at=(SAVE_AT,))
    straight, _, straight_recorder = train(first)
    if recipe.precision == "16-mixed":
        assert straight_recorder.skipped, "no step overflowed"
    saved = [root / "1" / f"step-{SAVE_AT}.ckpt"]
    for devices in numbers:
        passing = Run(
            out=str(root / str(devices)),
            recipe=dataclasses.replace(recipe, max_steps=SAVE_AT),
            devices=devices,
            resume=str(saved[-1]),
            save_after_fit=str(root / f"from-{devices}.ckpt"),
            transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 3},
            options={**options, "zero": {"sub_group_size": 10**9 if devices == 3 else 3000}},
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
    """Passing from one process to two and one again, with other sub-groups and rings, changes no bit.

    ``test_another_number_of_processes`` goes on with three from a checkpoint. The run has groups, a scheduler, a
    parameter unused for some steps, a frozen one, parameters smaller than the number of ranks, and a loss scale that
    skips the first steps.
    """
    passed_on(tmp_path, FP16, OPTIONS, (2,))


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
    first, saved = passed_on(tmp_path, LONG[name], {}, (2, 3))
    on = [
        dataclasses.replace(first, out=str(tmp_path / path.name / "on"), devices=3, save_at=(), resume=str(path))
        for path in (saved, convert_by_command(saved, tmp_path / "universal"))
    ]
    outcome, expected = launch(*on)
    assert outcome.losses == expected.losses and len(outcome.losses) == LONG["AdamW"].max_steps - SAVE_AT
    assert outcome.extra["steps"] == expected.extra["steps"]
    for name, master in expected.masters.items():
        assert torch.equal(outcome.masters[name], master), name
