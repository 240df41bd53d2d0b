"""Forked processes behave like new ones, and their failures are reported."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import run_module

WORKER = "tests.helpers.reporting_worker"


def test_ranks_are_like_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the expected environment, its own random numbers, its output, and a normal interpreter exit."""
    monkeypatch.setenv("SOMETHING", "set since the server started")
    done = run_module(WORKER, tmp_path, "well", ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["rank 0 says so", "rank 1 says so"]
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, of_rank in enumerate(seen):
        ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}
        told = {name: of_rank["environment"].pop(name) for name in (*ours, "MASTER_ADDR", "MASTER_PORT")}
        assert ours.items() <= told.items()
        assert of_rank["environment"] == fresh_environment()
        assert (of_rank["main"], of_rank["lightning's rank"]) == (WORKER, rank)
        assert (tmp_path / f"ended-{rank}").exists()
    for drawn in ("numpy", "torch", "random"):
        assert seen[0][drawn] != seen[1][drawn], drawn


@pytest.mark.parametrize(("how", "status"), [("badly", 1), ("never", -signal.SIGKILL)])
def test_a_rank_that_fails_ends_the_others(how: str, status: int, tmp_path: Path) -> None:
    """The status is that of the failing rank, whose traceback is printed."""
    done = run_module(WORKER, tmp_path, how, ranks=2)
    assert done.returncode == status
    assert ("RuntimeError: told to" in done.stderr) == (how == "badly")
    assert not (tmp_path / "ended-0").exists()
