"""A training on a GPU that is killed goes on from storage, with the GPU's random numbers where they were."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import REPOSITORY
from tests.helpers.runif import RunIf
from tests.helpers.waiting import PROCESS_LIMIT
from tests.training.storage_worker import StorageRun, end_of, steps_of

pytestmark = RunIf(cuda_devices=1)

ON_GPU: dict[str, Any] = {"trainer": {"accelerator": "cuda", "deterministic": True, "limit_val_batches": 0}}
SETTINGS: dict[str, dict[str, Any]] = {
    "forward": {"options": {"overlap": "forward"}},
    "parameters on storage": {
        "options": {"zero": {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}}
    },
    "int8": {"options": {"state_format": "int8", "overlap": "none"}},
    "gradients on storage": {"transfer": {"gradient_bytes": 256 << 10}},
}


def run(of: StorageRun) -> int:
    """Run in a new interpreter, as on a GPU no process may be forked; return the exit status."""
    config = Path(of.out) / "run.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(dataclasses.asdict(of)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.storage_worker", str(config)],
        cwd=REPOSITORY,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode in (0, -9), (done.stdout + done.stderr)[-6000:]
    return done.returncode


@pytest.mark.parametrize("name", SETTINGS)
def test_killed_and_resumed(name: str, tmp_path: Path) -> None:
    """Killed at a step, and saving beside the steps: each step and the end are those of a training that never died."""
    settings: dict[str, Any] = {**ON_GPU, **SETTINGS[name], "save_every": 4}
    straight = StorageRun(out=str(tmp_path / "straight"), storage=str(tmp_path / "a"), **settings)
    assert run(straight) == 0
    killed = StorageRun(
        out=str(tmp_path / "killed"), storage=str(tmp_path / "b"), kill_at="kill at step", kill_step=7, **settings
    )
    assert run(killed) == -9
    assert run(dataclasses.replace(killed, kill_at="", resume=True)) == 0
    assert steps_of(Path(killed.out)) == steps_of(Path(straight.out))
    assert end_of(Path(killed.out)) == end_of(Path(straight.out))
