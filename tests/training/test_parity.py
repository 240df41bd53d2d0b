"""One process, and two on the batches of both, train like plain torch, with all that Lightning adds to a step."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_smartinfinity.resume.loops import warn_of_other_processes
from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.ranks import on_ranks
from tests.training.test_loader_position import Plain
from tests.training.test_overlap import SMALL_RING
from tests.training.test_storage_resume_loaders import Module, fit
from tests.training.worker import Outcome, Run, launch, train

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


def assert_near(losses: list[float], masters: dict[str, torch.Tensor], expected: Any, precision: str) -> None:
    """Assert that losses and masters are those of plain torch, to the rounding of a precision."""
    kind = precision.split("-")[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), atol=LOSS_TOLERANCE[kind], rtol=0)
    assert masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        torch.testing.assert_close(masters[name], master, atol=MASTER_TOLERANCE[kind], rtol=0, msg=name)


def assert_equals_torch(outcome: Outcome, recipe: Recipe, *, world_size: int) -> None:
    """Assert that losses, masters and validation losses equal plain torch's."""
    expected = reference.train(recipe, world_size=world_size, skipped=outcome.extra["skipped"])
    assert_near(outcome.losses, outcome.masters, expected, recipe.precision)
    tolerance, validated = LOSS_TOLERANCE[recipe.precision.split("-")[0]], torch.tensor(expected.validated)
    torch.testing.assert_close(torch.tensor(outcome.extra["validated"]), validated, atol=tolerance, rtol=0)


def compare(recipe: Recipe, out: Path, **options: float) -> dict[str, Any]:
    """Train by ours and by torch, compare all losses, counts, masters and validations, and return what was noted."""
    module, _, recorder = train(Run(out=str(out), recipe=recipe, options=options))
    extra = {"validated": module.validated, **recorder.extra}
    assert_equals_torch(Outcome(module.losses, recorder.masters, extra, ""), recipe, world_size=1)
    steps = recipe.max_steps - len(extra["skipped"])
    # As in torch, a step that does not use a parameter leaves its count.
    unused = [len(recipe.skip_side_at) * name.startswith("side") for name in recorder.masters]
    assert sorted(extra["steps"]) == sorted(steps - each for each in unused)
    assert (
        extra["generation"],
        extra["state_entries"],
        extra["fp32_numel"],
    ) == (steps, 0, 0)
    return extra


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_trains_like_torch(precision: str, tmp_path: Path) -> None:
    """Losses and masters equal plain torch with an fp32 master, and DeepSpeed holds no optimizer state.

    A NaN never reaches the state, also without a loss scaler. Tiny parameters and validation equal torch's, too.
    """
    recipe = Recipe(precision=precision, accumulate=2, clip=0.3, groups=True, scheduler="step", max_steps=4)
    recipe = dataclasses.replace(recipe, nan_at=(1,), odd=True, epoch_batches=4, validate=True)
    extra = compare(recipe, tmp_path, **(STATIC_SCALE if precision.startswith("16") else {}))
    assert (extra["skipped"], len(extra["validated"])) == ([1], 2)


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
    assert compare(recipe, tmp_path, initial_scale_power=8, loss_scale_window=2)["loss_scale"] > 2.0**8


WINDOWS = Recipe(precision="bf16-true", accumulate=4, clip=0.3, groups=True, skip_side_at=(1,), max_steps=4)


def farthest(masters: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two trainings' masters."""
    return max(float((masters[name] - other).abs().max()) for name, other in others.items())


@pytest.mark.parametrize(
    ("precision", "devices"),
    long_but([("bf16-true", 2), ("16-mixed", 1)], itertools.product(PRECISIONS[1:], [1, 2])),
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
    assert difference > 0 and farthest(outcome.masters, expected.masters) < 0.5 * difference


def test_it_takes_half_of_the_memory(tmp_path: Path) -> None:
    """The gradients' memory is that of one micro-batch: two bytes per parameter."""
    recipe, transfer = dataclasses.replace(WINDOWS, max_steps=1), {"accumulate_in": "parameters"}
    _, trainer, _ = train(Run(out=str(tmp_path), recipe=recipe, transfer=transfer))
    strategy: Any = trainer.strategy
    assert strategy.host_bytes["gradient_arena"] == 2 * strategy.state_numel


# ---- two processes


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
ON_TWO = {
    "32-true": dataclasses.replace(EVERYTHING, scheduler="epoch", clip=0.5),
    "bf16-mixed": dataclasses.replace(EVERYTHING, scheduler="epoch", groups=True, eps=EPS_OF_16_BIT),
    "16-mixed": dataclasses.replace(EVERYTHING, eps=EPS_OF_16_BIT),
}


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
    for precision, recipe in ON_TWO.items():
        options = STATIC_SCALE if precision.startswith("16") else {}
        in_precision = dataclasses.replace(recipe, precision=precision)
        runs.append(Run(out=str(root / precision), recipe=in_precision, devices=2, options=options))
    outcomes = [*launch(runs[0], env=environment, anew=True), *launch(*runs[1:], env=environment)]
    return root, dict(zip(ON_TWO, outcomes, strict=True))


@pytest.mark.parametrize("precision", ON_TWO)
def test_every_scenario_trains_like_torch(precision: str, trained: tuple[Path, dict[str, Outcome]]) -> None:
    """Incomplete windows, frozen and tiny parameters, epoch schedulers and validation equal one torch process.

    If rank 1 alone sees NaN, no rank updates in any precision.
    """
    (root, outcomes), recipe = trained, dataclasses.replace(ON_TWO[precision], precision=precision)
    assert_equals_torch(outcomes[precision], recipe, world_size=2)
    assert outcomes[precision].extra["validated"]
    for rank in range(2):
        extra = json.loads((root / precision / f"losses-{rank}.json").read_text())
        assert (extra["skipped"], extra["generation"], set(extra["steps"])) == ([1], 3, {3})


def test_training_compiles_nothing(trained: tuple[Path, dict[str, Outcome]]) -> None:
    """Nothing is compiled between installation and the end of a fit: torch's extension cache stays empty."""
    assert not list((trained[0] / "extensions").iterdir())


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
