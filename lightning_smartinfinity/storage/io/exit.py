"""Lets the interpreter exit while calls that were given up have not returned.

Python's exit destroys all objects. Those of this package, of the model's loggers and others close files then, and
closing a file may wait for a disk that does not answer. So this module keeps all objects alive: the exit itself stays
Python's, with its atexit handlers, its wait for threads and its status.
"""

from __future__ import annotations

import _thread
import gc
import io
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from lightning_smartinfinity import native

__all__ = ["exit_beside"]

_FLUSH_SECONDS = 2.0


def exit_beside(calls: Sequence[str]) -> None:
    """Report calls that have not returned on stderr, and keep them from delaying the end of the process.

    Files that Python has buffered are flushed here, unless their disk does not answer within two seconds.

    Args:
        calls: Actions and paths of the calls.
    """
    # All objects that the end of the process would finalize: their destructors may wait for the disk.
    objects = gc.get_objects()
    values = [list(vars(module).values()) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    native.keep_at_exit([objects, values, [_locals_of(thread) for thread in sys._current_frames()]])
    with suppress(Exception):  # stderr may be closed or missing
        sys.stderr.write(
            f"lightning-smartinfinity: process {os.getpid()} ends, but has calls to storage that have not returned:"
            f" {', '.join(calls)}. If the process remains, it waits in the kernel, and no signal ends it until the disk"
            " answers or is removed.\n"
        )
        sys.stderr.flush()
    with suppress(RuntimeError):  # no thread can be started
        _flush([each for each in objects if issubclass(type(each), io.TextIOWrapper)])
        _flush([each for each in objects if issubclass(type(each), (io.BufferedWriter, io.BufferedRandom))])


def _flush(files: Sequence[io.IOBase]) -> None:
    """Flush files, each in a thread of its own: some of them may be on the disk that does not answer."""
    left = threading.Semaphore(0)

    def flush(file: io.IOBase) -> None:
        with suppress(Exception):
            file.flush()
        left.release()

    for file in files:
        _thread.start_new_thread(flush, (file,))
    for _ in files:
        if not left.acquire(timeout=_FLUSH_SECONDS):
            return


def _locals_of(thread: int) -> list[object]:
    """Return the local variables of a thread, which the interpreter would destroy."""
    found: list[object] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        found.append(list(frame.f_locals.values()))
        frame = frame.f_back
    return found
