"""Reads and writes of files in several transfers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lightning_smartinfinity.storage.io.files import OpenFile, write_all


def test_short_transfers_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer goes on where the one before it stopped; only the end of the file ends a read."""
    pwrite, preadv, content = os.pwrite, os.preadv, bytes(range(100))
    monkeypatch.setattr(os, "pwrite", lambda file, part, offset: pwrite(file, part[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:7]], offset))
    file = OpenFile(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    file.write_all(memoryview(content), 5)
    assert file.path.read_bytes() == bytes(5) + content
    memory = memoryview(bytearray(200))
    assert file.read_all(memory, 5) == 100 and bytes(memory[:100]) == content
    file.close()
    assert file.descriptor == -1


def test_a_write_that_writes_nothing() -> None:
    """It raises an error instead of leaving a part out."""
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_all(lambda part, offset: 0, memoryview(b"content"))
