"""Exports a checkpoint by the command, in a process that kills itself on the way.

python -m tests.export.killed_worker writing|replacing CHECKPOINT OUT safetensors|lightning
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.export import destination
from lightning_smartinfinity.export.lightning_file import _Streams
from lightning_smartinfinity.export.shards import Shards


def killing(function: Callable[..., Any], *, after: int) -> Callable[..., Any]:
    """Return the function, which kills the process instead of running once more than ``after`` times."""
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == after:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return function(*args, **kwargs)

    return called


if __name__ == "__main__":
    moment, checkpoint, out, to = sys.argv[1:]
    if moment == "writing":
        for writer in (Shards, _Streams):
            writer.write = killing(writer.write, after=2)  # type: ignore[method-assign]
    else:
        destination.put_in_place = killing(destination.put_in_place, after=0)  # type: ignore[attr-defined]
    sys.exit(main(["export", checkpoint, out, "--to", to]))
