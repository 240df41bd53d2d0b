"""Two processes train like plain torch on the batches of both, with all that Lightning adds to a step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_smartinfinity.resume.loops import warn_of_other_processes
from tests.helpers import reference
from tests.helpers.models import Recipe
from tests.helpers.ranks import on_ranks
from tests.training.loaders import Plain
from tests.training.test_parity import LOSS_TOLERANCE, MASTER_TOLERANCE, STATIC_SCALE
from tests.training.test_storage_resume_loaders import Module, fit
from tests.training.worker import Outcome, Run, launch, train

# 16-bit gradients of two ranks may cancel to rounding noise, which Adam with a small eps turns into full steps.
EPS_OF_16_BIT = 1e-2
EVERYTHING = Recipe(
    odd=True,
    frozen=True,
    accumulate=3,
    epoch_batches=4,
    max_steps=4,
    validate=True,
    nan_at=(1,),
    nan_rank=1,
)
SCENARIOS = {
    "32-true": dataclasses.replace(EVERYTHING, scheduler="epoch", clip=0.5),
    "bf16-mixed": dataclasses.replace(EVERYTHING, scheduler="epoch", groups=True, eps=EPS_OF_16_BIT),
    "16-mixed": dataclasses.replace(EVERYTHING, eps=EPS_OF_16_BIT),
}


def assert_equals_torch(outcome: Outcome, recipe: Recipe, *, world_size: int) -> None:
    """Assert that losses, masters and validation losses equal plain torch's."""
    expected = reference.train(recipe, world_size=world_size, skipped=recipe.nan_at)
    kind = recipe.precision.split("-")[0]
    for ours, theirs in ((outcome.losses, expected.losses), (outcome.extra["validated"], expected.validated)):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=LOSS_TOLERANCE[kind], rtol=0)
    assert outcome.masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        torch.testing.assert_close(outcome.masters[name], master, atol=MASTER_TOLERANCE[kind], rtol=0, msg=name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Outcome]]:
    """Train each scenario in a pair of processes without a compiler on the machine.

    The first pair are new interpreters, of which Lightning starts the second, and random hash seeds give each its own
    order of hashed items.
    """
    root = tmp_path_factory.mktemp("two")
    (root / "extensions").mkdir()
    environment = {
        **dict.fromkeys(("CC", "CXX", "CUDAHOSTCXX"), "/nonexistent"),
        "TORCH_EXTENSIONS_DIR": str(root / "extensions"),
        "PYTHONHASHSEED": "random",
    }
    runs = []
    for precision, recipe in SCENARIOS.items():
        options = STATIC_SCALE if precision.startswith("16") else {}
        in_precision = dataclasses.replace(recipe, precision=precision)
        runs.append(Run(out=str(root / precision), recipe=in_precision, devices=2, options=options))
    outcomes = [*launch(runs[0], env=environment, anew=True), *launch(*runs[1:], env=environment)]
    return root, dict(zip(SCENARIOS, outcomes, strict=True))


@pytest.mark.parametrize("precision", SCENARIOS)
def test_every_scenario_trains_like_torch(precision: str, trained: tuple[Path, dict[str, Outcome]]) -> None:
    """Incomplete windows, frozen and tiny parameters, epoch schedulers and validation equal one torch process.

    If rank 1 alone sees NaN, no rank updates in any precision.
    """
    (root, outcomes), recipe = trained, dataclasses.replace(SCENARIOS[precision], precision=precision)
    assert_equals_torch(outcomes[precision], recipe, world_size=2)
    assert outcomes[precision].extra["validated"]
    for rank in range(2):
        extra = json.loads((root / precision / f"losses-{rank}.json").read_text())
        assert (extra["skipped"], extra["generation"], set(extra["steps"])) == ([1], 3, {3})


def test_training_compiles_nothing(trained: tuple[Path, dict[str, Outcome]]) -> None:
    """Nothing is compiled between installation and the end of a fit: torch's extension cache stays empty."""
    assert not list((trained[0] / "extensions").iterdir())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_one_process_skips_a_step_that_is_not_finite(precision: str, tmp_path: Path) -> None:
    """Without a loss scaler a NaN never reaches the state either. Tiny parameters and validation equal torch's."""
    recipe = Recipe(precision=precision, nan_at=(1,), odd=True, epoch_batches=2, max_steps=4, validate=True)
    module, _, recorder = train(Run(out=str(tmp_path), recipe=recipe))
    assert recorder.extra["skipped"] == [1]
    outcome = Outcome(module.losses, recorder.masters, {"validated": module.validated}, "")
    assert_equals_torch(outcome, recipe, world_size=1)
    assert len(module.validated) == 2


def unshuffled() -> Any:
    return DataLoader(Plain(), 2)


def fit_on_ranks(root: Path) -> list[float]:
    """Fit an epoch as one of two processes, and resume it within; return the samples of this process."""
    begun, resumed = Module(unshuffled, breaks_at=2), Module(unshuffled)
    settings = {"devices": 2, "max_epochs": 1}
    fit(begun, root, seed=1, settings=settings)
    fit(resumed, root, seed=9, settings=settings, resume="storage")
    return [sample for *_, batches, _ in begun.seen + resumed.seen for batch in batches for sample in batch]


def test_an_order_that_is_not_shuffled_stays(tmp_path: Path) -> None:
    """Each process takes every second sample in turn, as torch's sampler gives them, also after a resume."""
    for rank, seen in enumerate(on_ranks(fit_on_ranks, tmp_path)):
        assert seen == [*DistributedSampler(Plain(), 2, rank, shuffle=False)]


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (1, 2, "in which 1 process had taken 3 batches. Now an epoch has 5 batches for each of 2 processes"),
        (2, 1, "in which each of 2 processes had taken 3 batches. Now an epoch has 5 batches for 1 process"),
    ],
)
def test_an_epoch_goes_on_with_another_number_of_processes(before: int, now: int, told: str) -> None:
    """A warning says how many batches the epoch still has, and what of the data they are."""
    progress = SimpleNamespace(current=SimpleNamespace(processed=3), is_last_batch=False)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress), epoch_progress=SimpleNamespace())
    loop.epoch_progress.current = SimpleNamespace(started=1)
    trainer = SimpleNamespace(fit_loop=loop, num_training_batches=5, world_size=now, is_global_zero=True)
    told += ". Of this epoch, 3 of them count as taken, and the other 2 are the first batches of the present DataLoader"
    with pytest.warns(UserWarning, match=f"{told}.* So the epoch repeats some samples and leaves out others. The"):
        warn_of_other_processes(trainer, before)
