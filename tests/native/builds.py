"""Builds native sources apart from the package, once per checkout and state of the sources."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from tests.helpers.waiting import BUILD_LIMIT

__all__ = ["ROOT", "built_once", "run"]

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, expect_success: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command. An error contains all of its output."""
    completed = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=BUILD_LIMIT)
    if expect_success:
        assert completed.returncode == 0, f"{command}\n{completed.stdout}\n{completed.stderr}"
    return completed


def built_once(library: str, *sources: Path, options: tuple[str, ...] = ()) -> Path:
    """Return the shared library of the first source, which includes the others.

    It is compiled unless ``build/`` has it, of the same sources and options.
    """
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-pthread", str(sources[0]), *options]
    state = hashlib.sha256(repr(command).encode())
    for source in sources:
        state.update(source.read_bytes())
    built = ROOT / "build" / sources[0].parent.name / state.hexdigest()[:16] / library
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")  # another process may compile it, too
        run(*command, "-o", unfinished)
        unfinished.rename(built)
    return built
