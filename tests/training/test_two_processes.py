"""Two processes train like plain torch on the batches of both, with all that Lightning adds to a step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.training.test_parity import LOSS_TOLERANCE, MASTER_TOLERANCE, STATIC_SCALE
from tests.training.test_resume import assert_same
from tests.training.worker import Outcome, Run, launch, train

# 16-bit gradients of two ranks may cancel to rounding noise, which Adam with a small eps turns into full steps.
EPS_OF_16_BIT = 1e-2
SCENARIOS = {
    "everything in fp32": Recipe(
        odd=True,
        frozen=True,
        scheduler="epoch",
        accumulate=3,
        clip=0.5,
        epoch_batches=4,
        max_steps=4,
        validate=True,
    ),
    "everything in bf16": Recipe(
        precision="bf16-mixed",
        eps=EPS_OF_16_BIT,
        odd=True,
        frozen=True,
        groups=True,
        scheduler="epoch",
        accumulate=3,
        epoch_batches=4,
        max_steps=4,
        validate=True,
    ),
    "everything in fp16": Recipe(
        precision="16-mixed",
        eps=EPS_OF_16_BIT,
        odd=True,
        frozen=True,
        accumulate=3,
        epoch_batches=4,
        max_steps=4,
        validate=True,
    ),
}
NOT_FINITE = {
    f"NaN in {precision}": Recipe(
        precision=precision, eps=EPS_OF_16_BIT, nan_at=(1, 3), nan_rank=1, max_steps=5, odd=True
    )
    for precision in ("32-true", "bf16-mixed", "16-mixed")
}
# test_gradient_budget.py has a NaN in bf16 on two ranks.
USUAL = ("everything in fp32", "everything in bf16", "NaN in 16-mixed")
RESUMED = Recipe(scheduler="epoch", epoch_batches=2, max_steps=6, validate=True, odd=True)


def assert_equals_torch(outcome: Outcome, recipe: Recipe, *, world_size: int) -> None:
    """Assert that losses, masters and validation losses equal plain torch's."""
    expected = reference.train(recipe, world_size=world_size, skipped=recipe.nan_at)
    kind = recipe.precision.split("-")[0]
    for ours, theirs in ((outcome.losses, expected.losses), (outcome.extra["validated"], expected.validated)):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=LOSS_TOLERANCE[kind], rtol=0)
    assert outcome.masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        torch.testing.assert_close(outcome.masters[name], master, atol=MASTER_TOLERANCE[kind], rtol=0, msg=name)


def _run(out: Path, recipe: Recipe) -> Run:
    return Run(
        out=str(out), recipe=recipe, devices=2, options=STATIC_SCALE if recipe.precision.startswith("16") else {}
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the runs of :func:`trained`."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def trained(root: Path, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Train every run that starts from scratch in one pair of new processes, without a compiler on the machine.

    Lightning starts the second process, and random hash seeds give each process its own order of hashed items.
    """
    (root / "extensions").mkdir()
    tools = dict.fromkeys(("CC", "CXX", "CUDAHOSTCXX"), "/nonexistent")
    environment = {**tools, "TORCH_EXTENSIONS_DIR": str(root / "extensions"), "PYTHONHASHSEED": "random"}
    names = [*SCENARIOS, *NOT_FINITE] if request.config.getoption("long") else USUAL
    recipes = {name: {**SCENARIOS, **NOT_FINITE}[name] for name in names}
    runs = [_run(root / name, recipe) for name, recipe in recipes.items()]
    straight = dataclasses.replace(_run(root / "straight", RESUMED), save_at=(3,))
    outcomes = launch(*runs, straight, env=environment, anew=True)
    return dict(zip([*recipes, "straight"], outcomes, strict=True))


@pytest.mark.parametrize("name", long_but(USUAL[:2], SCENARIOS))
def test_every_scenario_trains_like_torch(name: str, trained: dict[str, Outcome]) -> None:
    """Incomplete windows, frozen and tiny parameters, epoch schedulers and validation equal one torch process."""
    assert_equals_torch(trained[name], SCENARIOS[name], world_size=2)
    assert bool(trained[name].extra["validated"]) == SCENARIOS[name].validate


@pytest.mark.usefixtures("trained")
def test_training_compiles_nothing(root: Path) -> None:
    """Nothing is compiled between installation and the end of a fit: torch's extension cache stays empty."""
    assert not list((root / "extensions").iterdir())


@pytest.mark.parametrize("name", long_but(USUAL[2:], NOT_FINITE))
def test_a_gradient_not_finite_on_one_rank_skips_the_step_on_all(
    name: str, trained: dict[str, Outcome], root: Path
) -> None:
    """If rank 1 alone sees NaN, no rank updates in any precision, and training then equals torch."""
    recipe = NOT_FINITE[name]
    updates = recipe.max_steps - len(recipe.nan_at)
    for rank in range(2):
        extra = json.loads((root / name / f"losses-{rank}.json").read_text())
        assert extra["skipped"] == list(recipe.nan_at)
        assert extra["generation"] == updates
        assert set(extra["steps"]) == {updates}
    assert_equals_torch(trained[name], recipe, world_size=2)


def test_resume_with_an_epoch_scheduler_is_bit_exact(root: Path, trained: dict[str, Outcome]) -> None:
    """Two ranks that stop in the middle of an epoch resume with the rates and validation of an uninterrupted run."""
    straight, checkpoint = trained["straight"], str(root / "straight" / "step-3.ckpt")
    (resumed,) = launch(dataclasses.replace(_run(root / "resumed", RESUMED), resume=checkpoint))
    assert_same(resumed, straight, first_loss=3)
    assert resumed.extra["validated"] == straight.extra["validated"][1:]
    assert_equals_torch(straight, RESUMED, world_size=2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_one_process_skips_a_step_that_is_not_finite(precision: str, tmp_path: Path) -> None:
    """Without a loss scaler a NaN never reaches the state either. Tiny parameters and validation equal torch's."""
    recipe = Recipe(precision=precision, nan_at=(1,), odd=True, epoch_batches=2, max_steps=4, validate=True)
    module, _, recorder = train(Run(out=str(tmp_path), recipe=recipe))
    assert recorder.extra["skipped"] == [1]
    outcome = Outcome(module.losses, recorder.masters, {"validated": module.validated}, "")
    assert_equals_torch(outcome, recipe, world_size=1)
    assert len(module.validated) == 2
