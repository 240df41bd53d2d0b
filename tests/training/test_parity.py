"""One process trains like plain torch in every precision, with all that Lightning adds to a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.training.worker import Run, train

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
    "parameter unused at first": Recipe(skip_side_at=(0,), groups=True),
    "Adam with L2": Recipe(optimizer="Adam", weight_decay=0.02),
    "maximize": Recipe(optimizer_kwargs={"maximize": True}, lr=1e-4, max_steps=3),
    "other betas and eps": Recipe(optimizer_kwargs={"betas": (0.4, 0.99), "eps": 1e-3}),
}
# The tests of precisions, of bf16, of step counts and of two processes have the others, or a usual one has them among
# more.
USUAL = (
    "incomplete windows at the end of each epoch",
    "accumulation with clipping and groups",
    "parameter unused at first",
    "Adam with L2",
    "maximize",
)


def compare(recipe: Recipe, out: Path, **options: float) -> None:
    """Train with smart_infinity and with torch, and compare all losses and masters."""
    module, _, recorder = train(Run(out=str(out), recipe=recipe, options=options))
    expected = reference.train(recipe)
    kind = recipe.precision.split("-")[0]
    torch.testing.assert_close(
        torch.tensor(module.losses), torch.tensor(expected.losses), atol=LOSS_TOLERANCE[kind], rtol=0
    )
    assert recorder.masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        torch.testing.assert_close(recorder.masters[name], master, atol=MASTER_TOLERANCE[kind], rtol=0, msg=name)
    assert recorder.extra["state_entries"] == 0
    assert recorder.extra["fp32_numel"] == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_like_torch(precision: str, tmp_path: Path) -> None:
    """Losses and masters equal plain torch with an fp32 master, and DeepSpeed holds no optimizer state."""
    recipe = Recipe(precision=precision, groups=True, scheduler="step")
    compare(recipe, tmp_path, **(STATIC_SCALE if precision.startswith("16") else {}))


@pytest.mark.seam("accumulation until the step", "Strategy.handles_gradient_accumulation, gradient_accumulation_steps.")
@pytest.mark.parametrize("scenario", long_but(USUAL, SCENARIOS))
def test_every_scenario_trains_like_torch_in_fp32(scenario: str, tmp_path: Path) -> None:
    """fp32 training equals torch in every scenario."""
    compare(SCENARIOS[scenario], tmp_path)


# tests/fabric/test_training.py has an unused parameter in bf16.
@pytest.mark.parametrize(
    "scenario",
    long_but(
        ["accumulation with clipping and groups"],
        ["accumulation with clipping and groups", "parameter unused for two steps"],
    ),
)
def test_scenarios_train_like_torch_in_bf16(scenario: str, tmp_path: Path) -> None:
    """Scenarios with accumulation and unused parameters also equal torch in bf16."""
    compare(dataclasses.replace(SCENARIOS[scenario], precision="bf16-mixed"), tmp_path)


def test_overflow_skips_the_step_and_lowers_the_scale(tmp_path: Path) -> None:
    """fp16 steps with non-finite gradients change only the loss scale, and training then equals torch."""
    recipe = Recipe(precision="16-mixed", max_steps=8)
    options = {"initial_scale_power": 20, "hysteresis": 1}
    module, _, recorder = train(Run(out=str(tmp_path), recipe=recipe, options=options))
    skipped = recorder.extra["skipped"]
    assert 0 in skipped, "the scale was not high enough to overflow"
    assert recorder.extra["loss_scale"] == 2.0 ** (20 - len(skipped))
    assert recorder.extra["generation"] == max(recorder.extra["steps"]) == recipe.max_steps - len(skipped)
    expected = reference.train(recipe, skipped=skipped)
    torch.testing.assert_close(
        torch.tensor(module.losses), torch.tensor(expected.losses), atol=LOSS_TOLERANCE["16"], rtol=0
    )


def test_loss_scale_grows_after_a_quiet_window(tmp_path: Path) -> None:
    """A step that raises the loss scale still divides by the old one."""
    # Adam hardly depends on the scale of gradients, except with a large eps.
    recipe = Recipe(precision="16-mixed", max_steps=6, lr=0.1, optimizer_kwargs={"eps": 0.1})
    options = {"initial_scale_power": 8, "loss_scale_window": 2}
    module, _, recorder = train(Run(out=str(tmp_path), recipe=recipe, options=options))
    assert recorder.extra["loss_scale"] > 2.0**8
    expected = reference.train(recipe)
    torch.testing.assert_close(
        torch.tensor(module.losses), torch.tensor(expected.losses), atol=LOSS_TOLERANCE["16"], rtol=0
    )


def test_step_counts_are_kept_per_parameter(tmp_path: Path) -> None:
    """A parameter that a step does not use keeps its count, as in torch."""
    recipe = Recipe(skip_side_at=(1, 2), max_steps=5)
    module, _, recorder = train(Run(out=str(tmp_path), recipe=recipe))
    names = [name for name, p in module.model.named_parameters() if p.requires_grad]
    counts = dict(zip(names, recorder.extra["steps"], strict=True))
    assert counts["side.weight"] == counts["side.bias"] == 3
    assert {count for name, count in counts.items() if not name.startswith("side")} == {5}
