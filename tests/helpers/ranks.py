"""Calls a function on each rank: ``python -m tests.helpers.ranks MODULE FUNCTION FOLDER ARGUMENT...``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers.processes import run_module


def on_ranks(function: Callable[..., Any], folder: Path, *arguments: str | Path, ranks: int = 2) -> list[Any]:
    """Return what a function of a module returns on each rank, in forked processes.

    Args:
        function: Takes the folder and the arguments, which are text; what it returns is saved by torch.
        folder: A folder for its files.
        *arguments: Further arguments.
        ranks: Number of processes.
    """
    module = "tests.helpers.ranks"
    done = run_module(module, function.__module__, function.__qualname__, folder, *arguments, ranks=ranks)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [torch.load(_returned(folder, rank), weights_only=False) for rank in range(ranks)]


def _returned(folder: Path, rank: int) -> Path:
    return folder / f"returned-{rank}.pt"


def main() -> None:
    module, function, folder, *arguments = sys.argv[1:]
    returned = getattr(importlib.import_module(module), function)(Path(folder), *arguments)
    torch.save(returned, _returned(Path(folder), int(os.environ.get("RANK", "0"))))


if __name__ == "__main__":
    main()
