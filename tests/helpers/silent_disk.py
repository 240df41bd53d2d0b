"""A disk that does not answer, for tests of calls that have to be given up."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import posix
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.storage.folders import replacement
from lightning_smartinfinity.storage.io import deadlines as in_time
from tests.helpers.waiting import await_that

SECONDS = 0.2
"""The limit of calls in these tests."""

HURRY = 20
"""How many times as fast as it would the limit of a call passes that has stopped for good."""

ERROR = "StorageTimeoutError with path and seconds"
"""What most attacks on a disk end in, for the table of attacks."""

SAID = "the scrub says which file was not read"
"""What a scrub does."""

FILE_CALLS: list[tuple[Any, str]] = [
    *((os, name) for name in ("open", "pwrite", "pread", "fsync", "fdatasync", "posix_fadvise", "mkdir")),
    *((os, name) for name in ("stat", "lstat", "listdir", "scandir", "rename", "replace", "unlink", "rmdir", "link")),
    *((builtins, "open"), (io, "open"), (os, "chmod"), (replacement, "exchange")),
]
"""Functions that ask a disk for something."""


class SilentDisk:
    """A disk whose calls can stop answering, and whose counters stand still.

    Attributes:
        hung: Number of calls that have stopped.
        unguarded: Calls on paths of the test that nothing would have given up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counters: Path) -> None:
        self._patch = monkeypatch
        self._folder = str(counters.parent)
        self.answers = threading.Event()
        self.hung = 0
        self.unguarded: list[str] = []
        self.calls: list[object] = []  # that have not ended
        self._hanging: list[object] = []
        self.counters = counters
        counters.write_text("1 2 3 4 5")
        monkeypatch.setattr(in_time, "counters_of", lambda path: self.counters)
        make = in_time._Call.make

        def noted(call: Any) -> None:
            self.calls.append(call)
            make(call)
            self.calls.remove(call)

        next_wait = in_time._Limit.next_wait

        def hurried(limit: Any, *, interrupted: bool) -> float:
            wait = next_wait(limit, interrupted=interrupted)
            return wait / HURRY if limit._call in self._hanging else wait

        monkeypatch.setattr(in_time._Call, "make", noted)
        # No call that works has less time for this.
        monkeypatch.setattr(in_time._Limit, "next_wait", hurried)

    def hang(self, module: Any, name: str, *, when: Callable[..., bool] = lambda *_: True) -> None:
        """Let a function answer no more. The test fails if it is called where nothing would give it up."""
        original = getattr(module, name)

        def hanging(*args: Any, **kwargs: Any) -> Any:
            if not self.answers.is_set() and self._concerned(args, kwargs):
                if getattr(in_time._own, "call", None) is None:
                    self.unguarded.append(f"{name}{args}\n{''.join(traceback.format_stack(limit=6)[:-1])}")
                elif when(*args):
                    self.hung += 1
                    self._hanging.append(in_time._own.call)
                    self.answers.wait()
            return original(*args, **kwargs)

        self._patch.setattr(module, name, hanging)

    def _concerned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call is about a path of the test, or about something that is no path."""
        of = next(iter(args), None)
        if isinstance(of, (str, bytes, os.PathLike)) and not os.path.isabs(of):
            of = kwargs.get("dir_fd")
        if isinstance(of, int):
            of = posix.readlink(f"/proc/self/fd/{of}")
        if not isinstance(of, (str, bytes, os.PathLike)):
            return True
        return os.fsdecode(of).startswith(self._folder) and of != self.counters

    def works_until_it_hangs(self) -> None:
        """Let the disk complete requests until a call hangs, however long that takes on a busy machine."""
        numbers = itertools.count()
        self._patch.setattr(in_time, "completed_requests", lambda _: 0 if self.hung else next(numbers))

    def answer(self) -> None:
        """Let everything answer again, and return when all calls have returned."""
        self.answers.set()
        await_that(lambda: not self.calls)
        assert not self.unguarded, "\n".join(self.unguarded)


def gives_up(path: Path, doing: str) -> Any:
    """Expect the error of a call that was given up after :data:`SECONDS`."""
    told = rf"{doing} '{path}' did not return while its disk did nothing for {SECONDS} s"
    return pytest.raises(StorageTimeoutError, match=told)
