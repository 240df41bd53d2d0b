"""What stock DeepSpeed does in situations that users meet, beside our strategy and plain Lightning.

Situations of :mod:`tests.stock.situations` have stock's optimizer state in memory, where stock works best, those of
:mod:`tests.stock.on_nvme` on NVMe. Every test runs with our strategy and with stock, which passes or is expected to
fail for the reason given. That mark is strict: the test fails once stock passes.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import reference
from tests.helpers.hard_modules import train_plainly
from tests.helpers.plain import assert_alike
from tests.helpers.processes import run_module
from tests.stock.on_nvme import REASONS
from tests.stock.situations import OWN_BATCHES, SHARED_WEIGHTS
from tests.stock.systems import OURS, stock_fails

pytestmark = pytest.mark.long  # tests/training has the same of our strategy, beside other references

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
    "unshuffled": "Lightning adds a sampler that shuffles",
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


JUDGED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "random_states": (
        "as plain Lightning, it saves no random states: after a resume others are drawn",
        lambda losses: losses["resumed"] == losses["straight"] != [],
    ),
    "flipped_bit": ("trains on with what it read", lambda seen: "damaged" in seen["noticed"]),
    "failed_save": (
        "it writes over the checkpoint that is there: neither the old nor the new one is left",
        lambda seen: not seen["resuming"] and seen["resumed"] == seen["straight"][1:],
    ),
}
"""Situations that are right or wrong by themselves, and what is wrong with stock."""


@functools.cache
def outcome(system: str, name: str, devices: int = 1) -> dict[str, Any]:
    """Run a situation in a process of its own, once, and return its result or error."""
    with tempfile.TemporaryDirectory() as folder:
        return outcome_in(Path(folder), system, name, devices)


def outcome_in(folder: Path, system: str, name: str, devices: int = 1) -> dict[str, Any]:
    """Run a situation in a process of its own and in a folder, and return its result or error."""
    done = run_module("tests.stock.situations", folder, system, name, str(devices), ranks=devices)
    # An assertion here would count as one of stock's documented failures.
    if done.returncode != 0:
        raise RuntimeError((done.stdout + done.stderr)[-6000:])
    return torch.load(folder / "outcome.pt", weights_only=True)  # type: ignore[no-any-return]


def result(system: str, name: str, devices: int = 1) -> Any:
    """Return the result of a situation that must not raise."""
    found = outcome(system, name, devices)
    assert "error" not in found, found["error"]
    return found["result"]


def both(equal: Iterable[str], reasons: Mapping[str, str]) -> pytest.MarkDecorator:
    """Return a mark that runs our strategy, which passes, and stock, which passes or is documented to fail."""
    cases: list[Any] = [(system, name) for name in equal for system in (OURS, "stock")]
    for name, reason in reasons.items():
        cases += [(OURS, name), stock_fails(reason, name)]
    return pytest.mark.parametrize(("system", "name"), cases)


@both(EQUAL, UNLIKE_PLAIN)
def test_like_plain_lightning(system: str, name: str) -> None:
    """The user sees the same as with Lightning's own strategy for one CPU, up to rounding."""
    assert_alike(result(system, name), outcome("plain", name)["result"])


def test_stock_fails_in_the_way_that_is_described() -> None:
    """Stock raises exactly the documented errors."""
    found = {name: outcome("stock", name) for name in (*EQUAL, *UNLIKE_PLAIN, *JUDGED)}
    assert {name for name, of_one in found.items() if "error" in of_one} == ERRORS.keys()
    for name, error in ERRORS.items():
        assert re.match(error, found[name]["error"]), name
    assert not [name for name in (*OWN_BATCHES, "checkpointing") if "error" in outcome("stock", name, 2)]


@both([], {name: reason for name, (reason, _) in JUDGED.items()})
def test_what_users_rely_on(system: str, name: str) -> None:
    """Random numbers go on after a resume, a flipped bit is noticed, and a failed save leaves the old checkpoint."""
    seen = result(system, name)
    if name == "failed_save" and not seen["saving"]:
        raise RuntimeError("the save did not fail")
    assert JUDGED[name][1](seen)


@both(OWN_BATCHES, {})
def test_two_processes_are_one_torch_process(system: str, name: str) -> None:
    """Both train on the batches of both. Both skip a step that is not finite on one rank."""
    recipe = OWN_BATCHES[name]
    assert_alike(result(system, name, 2), reference.train(recipe, world_size=2, skipped=recipe.nan_at).losses)


@both([], {"checkpointing": UNLIKE_PLAIN["checkpointing"]})
def test_two_processes_share_weights_under_checkpoints(system: str, name: str) -> None:
    """Losses and masters equal plain torch's, however gradients fall into buckets."""
    expected = train_plainly(SHARED_WEIGHTS, world_size=2)
    assert_alike(result(system, name, 2), (expected.losses, expected.masters))


# ---- optimizer state on NVMe, with DeepSpeed's own swappers and I/O code

ON_NVME = {situation.__name__: reason for situation, reason in REASONS.items()}


def run(system: str, name: str, folder: Path) -> bool:
    """Run a situation in a process of its own, and return whether all was right."""
    found = outcome_in(folder, system, name)
    assert "error" not in found, found["error"]
    return bool(found["result"])


@pytest.mark.parametrize(
    ("system", "name"),
    [
        *((OURS, name) for name in ON_NVME),
        *(stock_fails(reason, name) if reason else ("stock", name) for name, reason in ON_NVME.items()),
    ],
)
def test_with_state_on_nvme(system: str, name: str, tmp_path: Path) -> None:
    """Ours is right, and stock is, or fails as described."""
    assert run(system, name, tmp_path)


@pytest.mark.parametrize("system", [OURS, stock_fails("its files stay for ever")])
def test_no_state_is_left_on_storage(system: str, tmp_path: Path) -> None:
    """After the process ends, no file is left in the storage folders."""
    if not run(system, "training", tmp_path):
        raise RuntimeError("the training went wrong")
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []
