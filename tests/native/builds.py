"""Builds the native sources apart from the package and without Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.helpers.waiting import BUILD_LIMIT

__all__ = ["ROOT", "configure", "run"]

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, expect_success: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command. An error contains all of its output."""
    completed = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=BUILD_LIMIT)
    if expect_success:
        assert completed.returncode == 0, f"{command}\n{completed.stdout}\n{completed.stderr}"
    return completed


def configure(folder: Path, **options: str) -> None:
    """Configure a build of the core alone."""
    settings = [f"-D{name}={value}" for name, value in options.items()]
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DSMART_INFINITY_BUILD_MODULE=OFF", *settings)
