"""Saves files of ``torch.save`` and flushes them to the device; gives up if the disk does not answer."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, cast

import torch
from typing_extensions import Buffer, override

from lightning_smartinfinity.common.progress import Advance
from lightning_smartinfinity.storage.io.files import OpenFile

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
        output.file.flush()


class _Output(io.RawIOBase):
    """A new file. After a failed write it discards further data, because buffers are flushed when they are collected.

    Args:
        path: Path of the file.
        advance: Function called with the number of bytes after each write.
        total_bytes: Total number of bytes to report.

    Attributes:
        file: The file.
        error: The error that the first failed write raised.
    """

    def __init__(self, path: Path, advance: Advance, *, total_bytes: int) -> None:
        self._advance = advance
        self._left = total_bytes
        self._offset = 0
        self.file = OpenFile(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, doing="Creating")
        self.error: BaseException | None = None

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, values: Buffer) -> int:
        content = memoryview(values).cast("B")
        if self.error is not None:
            return content.nbytes
        try:
            self.file.write_all(content, self._offset)
        except BaseException as error:
            self.error = error
            raise
        self._offset += content.nbytes
        reported = min(content.nbytes, self._left)
        self._left -= reported
        self._advance(reported)
        return content.nbytes

    @override
    def close(self) -> None:
        self.file.close()
        super().close()
