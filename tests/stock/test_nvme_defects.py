"""Defects of stock DeepSpeed with optimizer state on NVMe, beside this strategy.

Every test runs with our strategy and, among the long tests, with stock, whose run takes a minute. If stock is
expected to fail, the mark is strict: the test fails once stock passes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.helpers import reference
from tests.helpers.models import Recipe
from tests.helpers.processes import run_module
from tests.stock.comparison import OURS, stock_fails
from tests.stock.worker import ACCUMULATED, SAVE_AT, THREADS, UNUSED

pytestmark = pytest.mark.long  # tests/training has the same of our strategy, beside other references

Outcomes: TypeAlias = "dict[str, dict[str, Any]]"
LONG = pytest.mark.long


def both(reason: str) -> pytest.MarkDecorator:
    """Return a mark that runs our strategy, which passes, and stock, which is documented to fail."""
    return pytest.mark.parametrize("outcomes", [OURS, stock_fails(reason, marks=[LONG])], indirect=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {system: tmp_path_factory.mktemp(system) for system in (OURS, "stock")}


@pytest.fixture(scope="module")
def cache() -> dict[str, Outcomes]:
    return {}


@pytest.fixture
def outcomes(request: pytest.FixtureRequest, folders: dict[str, Path], cache: dict[str, Outcomes]) -> Outcomes:
    """Run all scenarios of :mod:`tests.stock.worker` once per system and return their outcomes."""
    system: str = request.param
    if system not in cache:
        cache[system] = run(system, folders[system])
    return cache[system]


@pytest.fixture
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    system: str = request.node.callspec.params["outcomes"]
    return folders[system]


def run(system: str, folder: Path) -> Outcomes:
    done = run_module("tests.stock.worker", system, folder)
    # An assertion here would count as stock's documented failure.
    if done.returncode != 0:
        raise RuntimeError((done.stdout + done.stderr)[-6000:])
    lines = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    return {name: json.loads(outcome) for name, outcome in lines}


@pytest.mark.parametrize("outcomes", [OURS, pytest.param("stock", marks=LONG)], indirect=True)
def test_both_train_alike_while_nothing_happens(outcomes: Outcomes) -> None:
    """Without disturbance both systems learn, so that the other tests compare two working systems."""
    losses = outcomes["straight"]["losses"]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] / 2


@both("moments and step are not in the checkpoint, and resume goes on from zeros without a word")
def test_resume_goes_on_as_if_never_stopped(outcomes: Outcomes) -> None:
    """A resumed run has the losses of the uninterrupted one."""
    assert outcomes["resume"].get("losses") == outcomes["resume"].get("expected") != []


@both("FileExistsError, as Lightning's last.ckpt finds out")
def test_saving_twice_to_one_path(outcomes: Outcomes) -> None:
    """A second save replaces the first."""
    assert "error" not in outcomes["save_twice"]


@both("fails on the empty partitions in its own checkpoint")
def test_zero_to_fp32_reads_the_checkpoint(outcomes: Outcomes) -> None:
    """DeepSpeed's script finds the masters of every parameter."""
    assert "error" not in outcomes["zero_to_fp32"]
    assert all(outcomes["zero_to_fp32"]["equal"])


@both("fails on the empty partitions in its own checkpoint")
def test_ds_to_universal_reads_the_checkpoint(outcomes: Outcomes) -> None:
    """DeepSpeed's script finds the moments of every parameter."""
    assert "error" not in outcomes["ds_to_universal"]
    assert all(outcomes["ds_to_universal"]["moments"])


@both("fails on the empty partitions in its own checkpoint")
def test_validating_a_checkpoint_in_a_fresh_trainer(outcomes: Outcomes) -> None:
    """Trainer.validate(ckpt_path=...) evaluates the saved weights."""
    assert "error" not in outcomes["validate"]
    assert outcomes["validate"]["loss"] < outcomes["straight"]["losses"][SAVE_AT - 1] + 0.5


@both("writes that fail are not noticed, training goes on with what was never stored")
def test_full_disk_is_noticed(outcomes: Outcomes) -> None:
    """When files cannot grow any further, training stops with an error that names the file."""
    assert outcomes["full_disk"]["noticed"] in ("StorageError", "StorageFullError")
    assert "state.bin" in outcomes["full_disk"]["message"]


@both("a bare AssertionError in the middle of the set-up")
def test_state_in_16_bit_trains(outcomes: Outcomes) -> None:
    """Moments in bf16 take 8 bytes per parameter instead of 12 in each place, and losses stay near those with fp32."""
    assert "error" not in outcomes["state_in_16_bit"]
    assert 16 <= outcomes["state_in_16_bit"]["bytes_per_parameter"] < 17
    losses, expected = (torch.tensor(outcomes[name]["losses"]) for name in ("state_in_16_bit", "straight"))
    torch.testing.assert_close(losses, expected, rtol=0, atol=2e-2)


@both("the second job writes into the first one's files, and its losses change")
def test_second_job_on_one_folder_is_refused(outcomes: Outcomes) -> None:
    """A second job in the same folder is locked out, and the first one's losses do not change."""
    assert outcomes["two_jobs"]["locked"]
    assert outcomes["two_jobs"]["losses"] == outcomes["straight"]["losses"]


@both("its files stay for ever")
def test_no_state_is_left_on_storage(outcomes: Outcomes, folder: Path) -> None:
    """After the process ends, no file is left in the storage folders."""
    assert outcomes
    assert [path for path in (folder / "storage").rglob("*") if path.is_file()] == []


@both("with its preset every swap buffer is as large as the model's partition: 16 bytes per parameter")
def test_defaults_hold_no_buffer_of_the_models_size(outcomes: Outcomes) -> None:
    """The buffers of the update are a ring of fixed size."""
    assert outcomes["preset"]["buffers"] < 4 * outcomes["preset"]["numel"]


@both("Lightning passes thread_count under a name that DeepSpeed does not read")
def test_setting_of_parallelism_arrives(outcomes: Outcomes) -> None:
    """A user's setting is in effect."""
    assert outcomes["preset"]["setting"] == THREADS


@both("a parameter without gradient is stepped again with its last one")
def test_unused_parameter_is_left_alone(outcomes: Outcomes) -> None:
    """Steps that do not use a parameter leave it unchanged, as torch's optimizers do."""
    _assert_like_torch(outcomes["unused_parameter"]["losses"], UNUSED)


@pytest.mark.parametrize("outcomes", [OURS, pytest.param("stock", marks=LONG)], indirect=True)
def test_accumulation_is_clipped_like_torch(outcomes: Outcomes) -> None:
    """Clipped steps over windows of two micro-batches equal torch's."""
    _assert_like_torch(outcomes["accumulation"]["losses"], ACCUMULATED)


@both("gradients travel to the disk and back with the state")
def test_only_state_travels(outcomes: Outcomes) -> None:
    """A step reads and writes 12 bytes per parameter each, plus up to 2 % for trailers and alignment."""
    assert 24 <= outcomes["straight"]["bytes_per_parameter"] < 24.5


def _assert_like_torch(losses: list[float], recipe: Recipe) -> None:
    expected = torch.tensor(reference.train(recipe).losses)
    torch.testing.assert_close(torch.tensor(losses), expected, rtol=0, atol=1e-3)
