"""The peak memory of a set-up stays near what the model itself takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.waiting import PROCESS_LIMIT
from tests.training.worker import REPOSITORY

# Measured: 4.2 and 3.1. When glibc kept freed blocks: 7.1 and 6.6.
BOUNDS = {
    "init": 4.9,  # bytes per parameter: 4 of the model that the user builds in fp32
    "configure_model": 3.9,  # 2 of a 16-bit parameter
}


@pytest.mark.long  # as tests/training/test_memory.py has it for a model that is built before the fit
@pytest.mark.parametrize("where", BOUNDS)
def test_set_up_takes_little_more_than_the_model(where: str, tmp_path: Path) -> None:
    """The peak above imports is bounded in bytes per parameter, and training needs more than its set-up."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.setup_memory_worker", str(tmp_path), where],
        cwd=REPOSITORY,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    figures = json.loads(done.stdout.split("FIGURES ")[1].splitlines()[0])
    peak = max(figures["built"], figures["set_up"])
    assert peak < BOUNDS[where] * figures["numel"]
    assert figures["set_up"] <= max(figures["steps"], 1.1 * figures["built"])
