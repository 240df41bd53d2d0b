"""Detects output that cannot be written: a full disk, a pipe closed by its reader, a closed stream."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, NoReturn

__all__ = ["OutputError", "checked_output"]


class OutputError(OSError):
    """Standard output or standard error cannot be written. A type of its own, unlike a command's other OSErrors."""


class _Checked:
    """A stream whose failures raise :class:`OutputError`, unlike those of other files.

    Args:
        stream: Standard output or standard error; ``None`` if the process has none.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._error: OutputError | None = None

    def write(self, text: str) -> int:
        if self._stream is None or self._stream.closed:
            self._fail(errno.EBADF)
        encoding = getattr(self._stream, "encoding", None)
        if encoding:  # file names may contain characters that the stream cannot encode
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        with self._failing():
            return int(self._stream.write(text))

    def flush(self) -> None:
        if self._error is not None:  # argparse ignores a failed write
            raise self._error
        if self._stream is not None and not self._stream.closed:
            with self._failing():
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._discard()
            self._fail(error.errno)

    def _fail(self, number: int | None) -> NoReturn:
        self._error = OutputError(number, os.strerror(number or errno.EIO))
        raise self._error from None

    def _discard(self) -> None:
        """Discard buffered text, whose flush would fail again at interpreter exit."""
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


@contextmanager
def checked_output() -> Iterator[None]:
    """Write everything that is printed in this context before it ends, or raise.

    Raises:
        OutputError: The output could not be written.
    """
    output = _Checked(sys.stdout)
    with redirect_stdout(output), redirect_stderr(_Checked(sys.stderr)):
        try:
            yield
        except SystemExit:  # argparse exits after --help
            output.flush()
            raise
        output.flush()
