"""One process trains like plain torch in every precision, with all that Lightning adds to a step."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.training.test_overlap import SMALL_RING
from tests.training.worker import Run, launch, train

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
STATIC_SCALE = {"loss_scale": 2.0**10}
# In fp32 torch contracts multiply-add where we do not. In 16 bit that difference sometimes changes how a parameter is
# rounded, which the next losses show.
LOSS_TOLERANCE = {"32": 5e-6, "bf16": 2e-2, "16": 4e-3}
MASTER_TOLERANCE = {"32": 2e-5, "bf16": 5e-3, "16": 2e-3}

SCENARIOS = {
    "plain": Recipe(),
    "groups and a scheduler by step": Recipe(groups=True, scheduler="step"),
    "scheduler by epoch": Recipe(scheduler="epoch", epoch_batches=2),
    "accumulation": Recipe(accumulate=3, max_steps=4),
    "incomplete windows at the end of each epoch": Recipe(accumulate=3, epoch_batches=4, max_steps=5),
    "clipping": Recipe(clip=0.3),
    "accumulation with clipping and groups": Recipe(accumulate=2, clip=0.3, groups=True, max_steps=4),
    "frozen parameter": Recipe(frozen=True),
    "untied weights": Recipe(tied=False),
    "parameter unused for two steps": Recipe(skip_side_at=(1, 2)),
    "parameter unused at first": Recipe(skip_side_at=(0, 3), groups=True),
    "Adam with L2": Recipe(optimizer="Adam", weight_decay=0.02),
    "maximize": Recipe(optimizer_kwargs={"maximize": True}, lr=1e-4, max_steps=3),
    "other betas and eps": Recipe(optimizer_kwargs={"betas": (0.4, 0.99), "eps": 1e-3}),
}
# The tests of precisions, of bf16, of step counts and of two processes have the others, or a usual one has them among
# more.
USUAL = (
    "incomplete windows at the end of each epoch",
    "parameter unused at first",
    "Adam with L2",
    "maximize",
)


def compare(recipe: Recipe, out: Path, **options: float) -> dict[str, Any]:
    """Train with smart_infinity and with torch, compare all losses, counts and masters, and return what was noted."""
    module, _, recorder = train(Run(out=str(out), recipe=recipe, options=options))
    extra = recorder.extra
    expected = reference.train(recipe, skipped=extra["skipped"])
    kind = recipe.precision.split("-")[0]
    torch.testing.assert_close(
        torch.tensor(module.losses), torch.tensor(expected.losses), atol=LOSS_TOLERANCE[kind], rtol=0
    )
    assert recorder.masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        torch.testing.assert_close(recorder.masters[name], master, atol=MASTER_TOLERANCE[kind], rtol=0, msg=name)
    steps = recipe.max_steps - len(extra["skipped"])
    # As in torch, a step that does not use a parameter leaves its count.
    unused = [len(recipe.skip_side_at) * name.startswith("side") for name in recorder.masters]
    assert sorted(extra["steps"]) == sorted(steps - each for each in unused)
    assert (extra["generation"], extra["state_entries"], extra["fp32_numel"]) == (steps, 0, 0)
    return extra


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_like_torch(precision: str, tmp_path: Path) -> None:
    """Losses and masters equal plain torch with an fp32 master, and DeepSpeed holds no optimizer state."""
    recipe = Recipe(precision=precision, accumulate=2, clip=0.3, groups=True, scheduler="step", max_steps=4)
    compare(recipe, tmp_path, **(STATIC_SCALE if precision.startswith("16") else {}))


@pytest.mark.seam("accumulation until the step", "Strategy.handles_gradient_accumulation, gradient_accumulation_steps.")
@pytest.mark.parametrize("scenario", long_but(USUAL, SCENARIOS))
def test_every_scenario_trains_like_torch_in_fp32(scenario: str, tmp_path: Path) -> None:
    """fp32 training equals torch in every scenario."""
    compare(SCENARIOS[scenario], tmp_path)


def test_overflow_skips_the_step_and_lowers_the_scale(tmp_path: Path) -> None:
    """fp16 steps with non-finite gradients change only the loss scale, and training then equals torch."""
    extra = compare(Recipe(precision="16-mixed", max_steps=8), tmp_path, initial_scale_power=20, hysteresis=1)
    assert 0 in extra["skipped"], "the scale was not high enough to overflow"
    assert extra["loss_scale"] == 2.0 ** (20 - len(extra["skipped"]))


def test_loss_scale_grows_after_a_quiet_window(tmp_path: Path) -> None:
    """A step that raises the loss scale still divides by the old one."""
    # Adam hardly depends on the scale of gradients, except with a large eps.
    recipe = Recipe(precision="16-mixed", max_steps=6, lr=0.1, optimizer_kwargs={"eps": 0.1})
    extra = compare(recipe, tmp_path, initial_scale_power=8, loss_scale_window=2)
    assert extra["loss_scale"] > 2.0**8


WINDOWS = Recipe(precision="bf16-true", accumulate=4, clip=0.3, groups=True, skip_side_at=(1,), max_steps=4)
SIXTEEN_BIT = ["bf16-true", "bf16-mixed", "16-true", "16-mixed"]


def farthest(masters: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two trainings' masters."""
    return max(float((masters[name] - other).abs().max()) for name, other in others.items())


@pytest.mark.parametrize(
    ("precision", "devices"),
    long_but([("bf16-true", 2), ("16-mixed", 1)], itertools.product(SIXTEEN_BIT, [1, 2])),
)
def test_added_in_the_dtype_of_the_parameters(
    precision: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters follow plain torch's, whose gradients have the parameters' dtype, and not those of sums in fp32.

    Each micro-batch is reduced over the ranks first, then added.
    """
    recipe = dataclasses.replace(WINDOWS, precision=precision)
    # DeepSpeed's own linear rounds once more in 16 bit, and stays in place in a process that has trained with it.
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    options = {"loss_scale": 2.0**10, "zero": {"memory_efficient_linear": False}}
    transfer = {**SMALL_RING, "accumulate_in": "parameters"}
    (outcome,) = launch(Run(out=str(tmp_path), recipe=recipe, devices=devices, transfer=transfer, options=options))
    expected = reference.train(recipe, world_size=devices, accumulate_in="parameters")
    in_fp32 = reference.train(recipe, world_size=devices)
    difference = farthest(expected.masters, in_fp32.masters)
    assert difference > 0
    assert farthest(outcome.masters, expected.masters) < 0.5 * difference


def test_it_takes_half_of_the_memory(tmp_path: Path) -> None:
    """The gradients' memory is that of one micro-batch: two bytes per parameter."""
    recipe, transfer = dataclasses.replace(WINDOWS, max_steps=1), {"accumulate_in": "parameters"}
    _, trainer, _ = train(Run(out=str(tmp_path), recipe=recipe, transfer=transfer))
    strategy: Any = trainer.strategy
    assert strategy.host_bytes["gradient_arena"] == 2 * strategy.state_numel
    strategy.close()
