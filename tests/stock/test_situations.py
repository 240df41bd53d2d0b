"""Situations of :mod:`tests.stock.situations` with stock's optimizer state in memory, where stock works best.

Every test runs with our strategy and, among the long tests, with stock, which passes or is expected to fail for the
reason given.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.helpers import reference
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.hard_models import train_plainly
from tests.helpers.plain import assert_alike
from tests.helpers.waiting import PROCESS_LIMIT
from tests.stock.comparison import OURS, stock_fails
from tests.stock.situations import OWN_BATCHES, SHARED_WEIGHTS
from tests.training.worker import REPOSITORY

pytestmark = pytest.mark.long  # tests/training has the same of our strategy, beside other references

Outcomes: TypeAlias = "dict[str, dict[str, Any]]"
LONG = pytest.mark.long

EQUAL = ("automatic", "clipped_windows", "fit_after_failed_start", "init_by_apply", "manual", "two_fits")
UNLIKE_PLAIN = {
    "checkpointing": "a gradient that arrives when its bucket has left overwrites what arrived before",
    "clipping_by_value": "refused by name",
    "evaluated_checkpoint": "an AttributeError in the loading of its own checkpoint",
    "fit_after_exception": "the parameters stay gathered, and the next fit fails on that",
    "gathered_writes": "the next step overwrites what was written with the masters, which never heard of it",
    "incomplete_windows": "the window at an epoch's end goes on in the next epoch, without a step",
    "init_like_transformers": "weights are written into tensors of zero elements without a word",
    "manual_clipping": "clip_gradients does nothing without a word",
    "penalty": "parameters are released when the second backward pass comes",
    "scheduled_accumulation": "refused by name",
    "several_backwards": "only the last backward pass before a step counts",
    "skipped_batch": "refused by name",
    "strided": "parameters that are not contiguous break the set-up",
}
ERRORS = {
    "clipping_by_value": "MisconfigurationException: DeepSpeed does not support clipping gradients by value",
    "evaluated_checkpoint": "AttributeError: .* has no attribute '_restore_from_bit16_weights'",
    "fit_after_exception": "RuntimeError: Cannot free a ZeRO-3 parameter while it is still active",
    "penalty": "RuntimeError: mat2 must be a matrix",
    "scheduled_accumulation": "RuntimeError: .* does not support `accumulate_grad_batches` changing between epochs",
    "skipped_batch": "MisconfigurationException: Skipping backward by returning `None`",
    "strided": r"RuntimeError: self.stride\(-1\) must be 1",
}
"""The errors that stock raises. In the other situations it gives wrong results without an error."""


def like_plain() -> list[Any]:
    """Return every situation for our strategy and for stock."""
    ours = [pytest.param(OURS, name) for name in (*EQUAL, *UNLIKE_PLAIN)]
    equal = [pytest.param("stock", name, marks=LONG) for name in EQUAL]
    return ours + equal + [stock_fails(reason, name, marks=[LONG]) for name, reason in UNLIKE_PLAIN.items()]


def both(reason: str) -> pytest.MarkDecorator:
    """Return a mark that runs our strategy, which passes, and stock, which is documented to fail."""
    return pytest.mark.parametrize("system", [OURS, stock_fails(reason, marks=[LONG])])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Run every situation in one process and its children and return the folder of outcomes."""
    systems = ("plain", OURS, "stock") if request.config.getoption("long") else ("plain", OURS)
    folder = tmp_path_factory.mktemp("situations")
    done = subprocess.run(
        [sys.executable, "-m", "tests.stock.forked", str(folder), *systems],
        cwd=REPOSITORY,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    # An assertion here would count as one of stock's documented failures.
    if done.returncode != 0:
        raise RuntimeError((done.stdout + done.stderr)[-6000:])
    return folder


def outcomes_in(folder: Path) -> Outcomes:
    return {file.stem: torch.load(file, weights_only=True) for file in folder.glob("*.pt")}


@pytest.fixture(scope="module")
def on_one(folder: Path) -> dict[str, Outcomes]:
    """Return the outcomes on one process by system and situation."""
    return {system: outcomes_in(folder / "1" / system) for system in ("plain", "stock", OURS)}


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[str, Outcomes]:
    """Return the outcomes on two processes by system and situation."""
    return {system: outcomes_in(folder / "2" / system) for system in ("stock", OURS)}


def result(outcome: dict[str, Any]) -> Any:
    """Return the result of a situation that must not have raised."""
    assert "error" not in outcome, outcome["error"]
    return outcome["result"]


@pytest.mark.parametrize(("system", "name"), like_plain())
def test_like_plain_lightning(system: str, name: str, on_one: dict[str, Outcomes]) -> None:
    """The user sees the same as with Lightning's own strategy for one CPU, up to rounding."""
    assert_alike(result(on_one[system][name]), on_one["plain"][name]["result"])


@LONG
def test_stock_fails_in_the_way_that_is_described(on_one: dict[str, Outcomes], on_two: dict[str, Outcomes]) -> None:
    """Stock raises exactly the documented errors."""
    outcomes = on_one["stock"]
    assert {name for name, outcome in outcomes.items() if "error" in outcome} == ERRORS.keys()
    for name, error in ERRORS.items():
        assert re.match(error, outcomes[name]["error"]), name
    assert not [name for name, outcome in on_two["stock"].items() if "error" in outcome]


@both("as plain Lightning, it saves no random states: after a resume others are drawn")
def test_random_numbers_go_on_after_a_resume(system: str, on_one: dict[str, Outcomes]) -> None:
    """Shuffling, augmentation and dropout after an epoch's end equal those of the uninterrupted run."""
    losses = result(on_one[system]["random_states"])
    assert losses["resumed"] == losses["straight"] != []


@both("trains on with what it read")
def test_a_flipped_bit_is_noticed(system: str, on_one: dict[str, Outcomes]) -> None:
    """A fit refuses a checkpoint with one bit changed."""
    assert "damaged" in result(on_one[system]["flipped_bit"])["noticed"]


@both("it writes over the checkpoint that is there: neither the old nor the new one is left")
def test_a_failed_save_leaves_the_checkpoint_before_it(system: str, on_one: dict[str, Outcomes]) -> None:
    """When the disk is full during a save, the older checkpoint at that path still resumes."""
    seen = result(on_one[system]["failed_save"])
    if not seen["saving"]:
        raise RuntimeError("the save did not fail")
    assert not seen["resuming"]
    assert seen["resumed"] == seen["straight"][1:]


@pytest.mark.parametrize("system", [OURS, pytest.param("stock", marks=LONG)])
@pytest.mark.parametrize("name", OWN_BATCHES)
def test_two_processes_are_one_torch_process(name: str, system: str, on_two: dict[str, Outcomes]) -> None:
    """Both train on the batches of both. Both skip a step that is not finite on one rank."""
    recipe = OWN_BATCHES[name]
    expected = reference.train(recipe, world_size=2, skipped=recipe.nan_at)
    assert_alike(result(on_two[system][name]), expected.losses)


@pytest.mark.parametrize("system", [OURS, stock_fails(UNLIKE_PLAIN["checkpointing"], marks=[LONG])])
def test_two_processes_share_weights_under_checkpoints(system: str, on_two: dict[str, Outcomes]) -> None:
    """Losses and masters equal plain torch's, however gradients fall into buckets."""
    expected = train_plainly(SHARED_WEIGHTS, world_size=2)
    assert_alike(result(on_two[system]["checkpointing"]), (expected.losses, expected.masters))
