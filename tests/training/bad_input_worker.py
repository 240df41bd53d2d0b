"""Tries cases of bad input in one of two processes: ``... bad_input_worker FOLDER``.

Every rank writes the error that it caught to ``FOLDER/<case>-<rank>.json``. The test prepares the obstacles.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.waiting import LIMIT
from tests.training.test_bad_input import fit

# This is more than the state of one rank and less than the state of both.
ROOM_FOR_ONE_BYTES = 2 * 1024 * 1024


def _this_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def free_bytes(count: int) -> Any:
    """Return a patch that makes every file system report ``count`` free bytes."""
    real = os.statvfs

    def statvfs(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[0] = values[1] = 4096  # f_bsize, f_frsize
        values[3] = values[4] = count // 4096  # f_bfree, f_bavail
        return os.statvfs_result(values)

    return mock.patch.object(os, "statvfs", statvfs)


def disk_full() -> Any:
    """Return a patch that makes every allocation fail."""
    return mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def on_rank_1(patch: Callable[[], Any]) -> Any:
    """Apply the patch on rank 1 only."""
    return patch() if _this_rank() == 1 else contextlib.nullcontext()


CASES: dict[str, Callable[[], Any]] = {
    "file-in-the-way": contextlib.nullcontext,
    "locked": contextlib.nullcontext,
    "no-space-on-one": lambda: on_rank_1(lambda: free_bytes(8192)),
    "no-space-for-both": lambda: free_bytes(ROOM_FOR_ONE_BYTES),
    "full-at-allocation": lambda: on_rank_1(disk_full),
    "unsupported-optimizer": contextlib.nullcontext,
    "nothing-wrong": contextlib.nullcontext,
}


def attempt(case: str, root: Path) -> dict[str, Any]:
    """Fit the case once and return the error that it raised."""
    module = LitTiny(Recipe(width=64))
    if case == "unsupported-optimizer":
        module.configure_optimizers = lambda: torch.optim.NAdam(module.parameters())  # type: ignore[method-assign]
    strategy = SmartInfinityStrategy(root / case / "storage", timeout=timedelta(seconds=LIMIT))
    try:
        with CASES[case]():
            fit(module, strategy, root / case, devices=2)
    except SmartInfinityError as error:
        return {"error": type(error).__name__, "message": str(error), "remedy": error.remedy}
    finally:
        strategy.close()
    return {"error": None, "losses": module.losses}


def main() -> None:
    root = Path(sys.argv[1])
    for case in CASES:
        outcome = attempt(case, root)
        (root / f"{case}-{_this_rank()}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
