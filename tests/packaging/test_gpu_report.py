"""``tools/gpu_report.sh`` with a stand-in for Python: every stage runs, whatever became of those before it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.helpers.waiting import PROCESS_LIMIT

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_report.sh"


def report(root: Path, python: str, *arguments: str, limit: int = 60) -> subprocess.CompletedProcess[str]:
    """Run the script with a Python that is a shell script, and an nvidia-smi that succeeds."""
    for name, content in (("python", python), ("nvidia-smi", "echo a GPU")):
        (root / name).write_text(f"#!/bin/bash\n{content}\n")
        (root / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{root}:{os.environ['PATH']}", "PYTHON": "python", "LIMIT": str(limit)}
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, env=environment, timeout=PROCESS_LIMIT, check=False
    )


def stages(results: Path) -> dict[str, str]:
    lines = (results / "report.txt").read_text().splitlines()[1:]
    return {line.split()[0]: line[13:22].strip() for line in lines}


def test_all_stages_pass(tmp_path: Path) -> None:
    """The results are the outputs; what was built is removed, a folder on the drive that was given stays."""
    storage = tmp_path / "drive"
    done = report(tmp_path, 'echo "$@"', str(tmp_path / "results"), str(storage))
    assert done.returncode == 0, done.stdout + done.stderr
    found = stages(tmp_path / "results")
    names = ("nvidia-smi", "versions", "build", "tests", "step", "budgets", "activations")
    assert found == dict.fromkeys(names, "passed")
    assert "--storage " + str(storage) in (tmp_path / "results" / "step.txt").read_text()
    assert {path.suffix for path in (tmp_path / "results").iterdir()} == {".txt"} and storage.is_dir()


def test_stages_that_fail(tmp_path: Path) -> None:
    """The others run, the report says which failed, and so does the exit status."""
    done = report(tmp_path, '[[ "$*" != *install* && "$*" != *gpu_step* ]]', str(tmp_path / "results"))
    assert done.returncode == 1
    found = stages(tmp_path / "results")
    assert (found["build"], found["tests"], found["step"]) == ("failed:1", "passed", "failed:1")
    assert not (tmp_path / "results" / "storage").exists()


def test_a_stage_that_takes_too_long(tmp_path: Path) -> None:
    """It is ended when the time is over, and the later stages have none."""
    done = report(tmp_path, '[[ "$*" != *pytest* ]] || exec sleep 60', str(tmp_path / "results"), limit=6)
    assert done.returncode == 1
    found = stages(tmp_path / "results")
    assert {found[name] for name in ("tests", "step", "budgets", "activations")} == {"too long"}


def test_usage(tmp_path: Path) -> None:
    """Without a folder for the results the script says what it wants, and does nothing."""
    done = report(tmp_path, "exit 0")
    assert done.returncode == 2 and "tools/gpu_report.sh RESULTS [STORAGE]" in done.stdout
