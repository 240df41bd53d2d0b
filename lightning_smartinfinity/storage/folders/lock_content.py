"""The content of a rank folder's lock: text, one item a line.

The lines are::

    pid of the holder
    sealed-<version>-<pid>-<number of notes>-<CRC-32 in hexadecimal>-<version of the package that wrote the file>
    notes

The CRC-32 is that of the second line without it, and of the notes. What follows the notes is ignored: a kill may leave
it there. Versions of the package before 0.1.0.dev6 write no second line and, if there is one, keep it among the notes.
Its pid is then not that of the first line, and it is ignored. Future versions keep the first two lines.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from lightning_smartinfinity import __version__
from lightning_smartinfinity.common.versions import unreadable
from lightning_smartinfinity.errors import StorageCorruptError, StorageError

__all__ = [
    "ARCHIVED",
    "KEPT",
    "LOCK_VERSION",
    "REMOVED",
    "SUCCESSOR",
    "checkpoint_in",
    "checkpoint_note",
    "packed",
    "successor_in",
    "unpacked",
]

LOCK_VERSION = 1
"""Format version of the locks that are written now."""
KEPT = "keep"
"""Note in the lock of a store that a later job must leave alone."""
ARCHIVED = "aside"
"""Note in the lock of an archived store, until a training resumes from it."""
REMOVED = "removed"
"""Note in the lock of a store whose files are being deleted."""
SUCCESSOR = "successor-"
"""Prefix of a further note in such a lock: the job id of stores for another number of ranks, filled from that store."""

_SEAL = re.compile(rb"sealed-([0-9]{1,9})-([0-9]{1,19})-([0-9]{1,9})-([0-9a-f]{8})-([^\n]*)")
_SEALED = b"sealed-"  # how a seal begins
_CHECKPOINT = "checkpoint-"  # prefix of a note: the step and the path of the newest checkpoint


def packed(pid: int, notes: Iterable[str]) -> bytes:
    """Return the content of a lock."""
    lines = [note.encode() for note in sorted(notes)]
    seal = _Seal(LOCK_VERSION, pid, len(lines), __version__.encode())
    return b"".join(b"%s\n" % line for line in (b"%d" % pid, seal.line(lines), *lines))


def unpacked(path: Path, content: bytes) -> tuple[int | None, frozenset[str]]:
    """Return the pid of the last holder of a lock, if it is known, and the notes.

    Args:
        path: Path of the lock, for errors.
        content: Its content.

    Raises:
        StorageCorruptError: It is damaged, or not of this package.
        StorageError: A newer version of this package wrote it.
    """
    if not content.strip(b"\0"):
        return None, frozenset()
    first, *lines = content.split(b"\n")
    # A damaged file may have thousands of digits, for which int() raises a ValueError.
    if not (first.isdigit() and len(first) < 20):
        raise _damaged(path)
    pid: int | None = int(first)
    if lines and lines[0].startswith(_SEALED):
        pid, lines = _unsealed(path, int(first), lines)
    notes = (line.decode(errors="replace") for line in lines if not line.startswith(_SEALED))
    return pid, frozenset(filter(None, notes))


def successor_in(notes: Iterable[str]) -> bytes | None:
    """Return the job id in a note of :data:`SUCCESSOR`; None if there is none."""
    for note in notes:
        if note.startswith(SUCCESSOR):
            with suppress(ValueError):
                return bytes.fromhex(note.removeprefix(SUCCESSOR))
    return None


def checkpoint_note(path: str, *, step: int) -> str:
    """Return the note that names the newest checkpoint of a training."""
    return f"{_CHECKPOINT}{step}-{quote_from_bytes(os.fsencode(path))}"


def checkpoint_in(notes: Iterable[str]) -> tuple[int, str] | None:
    """Return the step and the path of the newest checkpoint that notes name; None if they name none."""
    for note in notes:
        step, _, path = note.removeprefix(_CHECKPOINT).partition("-")
        if note.startswith(_CHECKPOINT) and step.isascii() and step.isdigit() and len(step) < 20:
            return int(step), os.fsdecode(unquote_to_bytes(path))
    return None


class _Seal(NamedTuple):
    """The second line of a lock without its checksum."""

    version: int
    pid: int
    num_notes: int
    package: bytes

    def checksum(self, notes: Sequence[bytes]) -> int:
        return zlib.crc32(b"\n".join((b"%d-%d-%d-%s" % self, *notes)))

    def line(self, notes: Sequence[bytes]) -> bytes:
        return b"sealed-%d-%d-%d-%08x-%s" % (*self[:3], self.checksum(notes), self.package)


def _unsealed(path: Path, holder: int, lines: list[bytes]) -> tuple[int | None, list[bytes]]:
    """Return the holder, or None if it is uncertain, and the notes, given the lines from the seal on.

    Raises:
        StorageCorruptError: The seal does not match.
        StorageError: A newer version of this package wrote the lock.
    """
    found, notes = _SEAL.fullmatch(lines[0]), lines[1:]
    if found is None:
        raise _damaged(path)
    seal = _Seal(int(found[1]), int(found[2]), int(found[3]), found[5])
    if seal.checksum(notes[: seal.num_notes]) != int(found[4], 16):
        if seal.pid != holder:
            return holder, notes  # an earlier version has changed the notes since
        raise _damaged(path)
    if seal.version > LOCK_VERSION:
        problem, remedy = unreadable(
            repr(str(path)),
            version=seal.version,
            reads=(LOCK_VERSION, LOCK_VERSION),
            writer=seal.package.decode(errors="replace"),
        )
        raise StorageError(problem, f"{remedy}, or choose another TransferConfig(job=...).")
    return (holder if seal.pid == holder else None), notes[: seal.num_notes]


def _damaged(path: Path) -> StorageCorruptError:
    return StorageCorruptError(
        f"{str(path)!r} is damaged, or is not a lock of this package.",
        "Remove it, or choose another TransferConfig(job=...).",
    )
