"""Finds the mount that a folder lies on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.devices.smartssd.discovery.system import System, text_of

__all__ = ["Mount", "mount_of"]


class Mount(NamedTuple):
    """A line of mountinfo.

    Args:
        point: Folder where it is mounted.
        kind: Type of its file system.
        device: Its block device as ``"major:minor"``; the major number is 0 if it has none of its own.
        source: What was mounted, for messages.
    """

    point: Path
    kind: str
    device: str
    source: str


def mount_of(system: System, folder: Path) -> Mount | None:
    """Return the mount of a folder, which need not exist yet; ``None`` if mountinfo does not tell."""
    path = Path(os.path.realpath(folder))
    found = None
    for mount in _mounts(system):
        covers = mount.point == path or mount.point in path.parents
        # The later of two mounts at one point covers the earlier.
        if covers and (found is None or len(mount.point.parts) >= len(found.point.parts)):
            found = mount
    return found


def _mounts(system: System) -> list[Mount]:
    mounts = []
    for line in (text_of(system.mountinfo, errors="surrogateescape") or "").splitlines():
        # Any number of optional fields stands between the fixed fields and the separator.
        fixed, separator, rest = line.partition(" - ")
        fields, described = fixed.split(" "), rest.split(" ")
        if separator and len(fields) >= 5 and len(described) >= 2:
            mounts.append(Mount(Path(_plain(fields[4])), described[0], fields[2], _plain(described[1])))
    return mounts


def _plain(escaped: str) -> str:
    """Decode the octal escapes by which the kernel writes blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)
