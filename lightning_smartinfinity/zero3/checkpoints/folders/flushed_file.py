"""Saves files of ``torch.save`` and flushes them to the device; gives up if the disk does not answer."""

from __future__ import annotations

import io
import os
import time
from functools import partial
from pathlib import Path
from typing import IO, cast

import torch
from typing_extensions import Buffer, override

from lightning_smartinfinity.common.progress import Advance
from lightning_smartinfinity.storage.io.deadlines import unless_idle, when_returned

__all__ = ["save_flushed"]

_BUFFERED_BYTES = 1024 * 1024


def save_flushed(state: object, path: Path, *, advance: Advance = lambda _: None, total_bytes: int = 0) -> None:
    """Save as ``torch.save`` does, and flush the file to the device.

    Args:
        state: Object to save.
        path: Path of the file.
        advance: Function called with the number of bytes after each write.
        total_bytes: Total number of bytes to report; more is written, because the file has headers.

    Raises:
        StorageTimeoutError: The disk does not answer.
        OSError: The file could not be written.
        RuntimeError: torch could not write the object.
    """
    with _Output(path, advance, total_bytes=total_bytes) as output:
        buffered = io.BufferedWriter(output, _BUFFERED_BYTES)
        try:
            torch.save(state, cast(IO[bytes], buffered))
            buffered.flush()
        except RuntimeError:
            if output.error is not None:  # torch raised its own error instead
                raise output.error from None
            raise
        unless_idle(partial(os.fsync, output.fileno()), doing="Flushing", path=path)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


class _Output(io.RawIOBase):
    """A new file. After a failed write it discards further data, because buffers are flushed when they are collected.

    Args:
        path: Path of the file.
        advance: Function called with the number of bytes after each write.
        total_bytes: Total number of bytes to report.

    Attributes:
        error: The error that the first failed write raised.
    """

    def __init__(self, path: Path, advance: Advance, *, total_bytes: int) -> None:
        self._path = path
        self._advance = advance
        self._left = total_bytes
        self._before = time.monotonic()
        self._descriptor = unless_idle(partial(_create, path), doing="Creating", path=path, undo=os.close)
        self.error: BaseException | None = None

    @override
    def fileno(self) -> int:
        return self._descriptor

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, values: Buffer) -> int:
        if self.error is not None:
            return memoryview(values).nbytes
        try:
            write = partial(os.write, self._descriptor, values)
            written = unless_idle(write, doing="Writing", path=self._path)
        except BaseException as error:
            self.error = error
            raise
        reported = min(written, self._left)
        self._left -= reported
        self._advance(reported)
        return written

    @override
    def close(self) -> None:
        if not self.closed:
            when_returned(partial(os.close, self._descriptor), since=self._before)
        super().close()
