"""Which mount a folder lies on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.devices.smartssd.system import System, text_of

__all__ = ["Mount", "mount_of"]


class Mount(NamedTuple):
    """One line of mountinfo.

    Args:
        point: Where it is mounted.
        kind: Of its file system.
        device: Its block device as ``"major:minor"``; the major number is 0 where it has none of its own.
        source: What was mounted, for messages.
    """

    point: Path
    kind: str
    device: str
    source: str


def mount_of(system: System, folder: Path) -> Mount | None:
    """The mount that a folder, there already or not, lies on; None: mountinfo does not tell."""
    path = Path(os.path.realpath(folder))
    found = None
    for mount in _mounts(system):
        covers = mount.point == path or mount.point in path.parents
        # Of two mounts at one point the later one covers the earlier.
        if covers and (found is None or len(mount.point.parts) >= len(found.point.parts)):
            found = mount
    return found


def _mounts(system: System) -> list[Mount]:
    mounts = []
    for line in (text_of(system.mountinfo) or "").splitlines():
        # Between the fixed fields and these stand any number of others.
        fixed, separator, rest = line.partition(" - ")
        fields, described = fixed.split(" "), rest.split(" ")
        if separator and len(fields) >= 5 and len(described) >= 2:
            mounts.append(Mount(Path(_plain(fields[4])), described[0], fields[2], _plain(described[1])))
    return mounts


def _plain(escaped: str) -> str:
    """The kernel writes blanks, tabs, newlines and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)
