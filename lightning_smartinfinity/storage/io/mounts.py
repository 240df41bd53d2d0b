"""Finds the mount that contains a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["IN_MEMORY", "Mount", "is_in_memory", "mount_of", "num_drives"]

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""Types of file systems whose files are in memory."""

_MOUNTINFO = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """A line of mountinfo.

    Args:
        point: Folder of the mount point.
        kind: Type of the file system.
        device: Block device as ``"major:minor"``; the major number is 0 if the file system has no device of its own.
        source: Mounted device or file system, for messages.
    """

    point: Path
    kind: str
    device: str
    source: str


def mount_of(folder: Path, mountinfo: Path = _MOUNTINFO) -> Mount | None:
    """Return the mount of a folder, which need not exist yet; ``None`` if mountinfo lists none or cannot be read."""
    path = Path(os.path.realpath(folder))
    found = None
    for mount in _mounts(mountinfo):
        covers = mount.point == path or mount.point in path.parents
        # The later of two mounts at one point hides the earlier one.
        if covers and (found is None or len(mount.point.parts) >= len(found.point.parts)):
            found = mount
    return found


def is_in_memory(folder: Path) -> bool:
    """Return whether the files of a folder, which need not exist yet, are in memory (tmpfs or ramfs)."""
    mount = mount_of(folder)
    return mount is not None and mount.kind in IN_MEMORY


def num_drives(folders: Iterable[Path]) -> int:
    """Return the number of devices whose file systems hold folders, which need not exist yet; at least 1."""
    return max(1, len({mount.device for mount in map(mount_of, folders) if mount is not None}))


def _mounts(mountinfo: Path) -> list[Mount]:
    mounts = []
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        # There may be any number of optional fields between the fixed fields and the separator.
        fixed, separator, rest = line.partition(" - ")
        fields, described = fixed.split(" "), rest.split(" ")
        if separator and len(fields) >= 5 and len(described) >= 2:
            mounts.append(Mount(Path(_plain(fields[4])), described[0], fields[2], _plain(described[1])))
    return mounts


def _plain(escaped: str) -> str:
    """Decode the kernel's octal escapes of blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)
