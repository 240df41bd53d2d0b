"""Exports take memory for a few windows, whatever the size of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import REPOSITORY
from tests.helpers.waiting import PROCESS_LIMIT

DEPTH = 16  # 67 million parameters: 134 MB in bf16, 268 MB of masters
BOUND = 120_000_000


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "tests.export.memory_worker", str(tmp_path_factory.mktemp("memory")), str(DEPTH)]
    environment = fresh_environment() | {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.split("FIGURES ")[1].splitlines()[0])
    return result


@pytest.mark.parametrize("what", ["live", "live_masters", "safetensors", "lightning"])
def test_an_export_passes_through_windows(what: str, figures: dict[str, Any]) -> None:
    """Peak memory grows by less than the weights have bytes."""
    assert 2 * figures["parameters"] > BOUND
    assert figures[what] < BOUND, figures
