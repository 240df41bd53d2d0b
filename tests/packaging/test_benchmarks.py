"""Benchmarks run, at their smallest size."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import lightning_smartinfinity.native._core as core
from tests.helpers.fresh_python import fresh_environment
from tests.native.builds import run
from tests.training.worker import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
# Arguments of a run that takes seconds, and what the lines of its table begin with.
RUNS = {
    "checkpoint_memory.py": (
        ["--size", "tiny"],
        ["|  |", "| smart_infinity, save |", "| smart_infinity, load |", "| smart_infinity, evaluate |"],
    ),
    "engines.py": (
        ["--tiny", "--folder", "."],
        ["| engine |", "| io_uring | huge | yes |", "| threads | 4 KiB | no |", "| plain |"],
    ),
    "formats.py": (
        ["--tiny"],
        ["| format | read + written", "| format | seed 0 |", "| fp32 |", "| bf16 |", "| int8 |", "| int8_remainder |"],
    ),
    "import_time.py": (["--runs", "1"], ["import torch, autoload on", "  this package's entry point"]),
    "native_kernels.py": (["--tiny", "--folder", "."], ["sum of squares", "CRC-32C", "step compute", "whole step"]),
    "peak_memory.py": (
        ["--size", "tiny", "--systems", "smart_infinity", "adamw", "--steps", "4"],
        ["| system |", "| smart_infinity |", "| adamw |"],
    ),
}


# Scripts that need what the machines that run the tests lack, and what they say without it.
REFUSALS = {"gpu_step.py": "measures copies from and to a CUDA device; torch finds none here"}


@pytest.mark.parametrize("script", RUNS)
def test_benchmark_prints_its_table_with_the_machine(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script exits with 0, prints the machine above the rows of its table and leaves no file behind."""
    for name in set(os.environ) - set(fresh_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(core.__file__).parents[2]), str(REPOSITORY)]))
    monkeypatch.chdir(tmp_path)
    arguments, rows = RUNS[script]
    lines = run(sys.executable, BENCHMARKS / script, *arguments).stdout.splitlines()
    assert re.search(r"\d+ cores, .* GiB of memory, Linux \d", lines[0])
    assert [row for row in rows if not any(line.startswith(row) for line in lines)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", REFUSALS)
def test_benchmark_refuses_where_it_cannot_measure(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is missing and measures nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused = run(sys.executable, BENCHMARKS / script, expect_success=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert REFUSALS[script] in refused.stderr


def test_every_benchmark_is_run_here_and_named_in_the_readme() -> None:
    """A new script has to be added to both."""
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(RUNS) | set(REFUSALS)
    readme = (BENCHMARKS / "README.md").read_text()
    assert [path.name for path in BENCHMARKS.glob("*.py") if f"`{path.name}`" not in readme] == []
