"""Where a machine describes itself: tests put trees of their own in its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["System", "entries_of", "text_of"]


def _may_use(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


@dataclass(frozen=True, kw_only=True)
class System:
    """What is read to find cards and SSDs.

    Args:
        sysfs: The kernel's devices.
        mountinfo: The mounts that this process sees.
        dev: Device nodes.
        environment: Of this process.
        may_use: Whether this user may read and write a device node.
    """

    sysfs: Path = Path("/sys")
    mountinfo: Path = Path("/proc/self/mountinfo")
    dev: Path = Path("/dev")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    may_use: Callable[[Path], bool] = _may_use

    @property
    def emulated(self) -> bool:
        """Whether XRT is told to emulate its devices: then sysfs has none of them."""
        return bool(self.environment.get("XCL_EMULATION_MODE"))


def text_of(path: Path) -> str | None:
    """Content of a small file of sysfs without its last newline; None: there is none, or it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def entries_of(folder: Path) -> list[Path]:
    """What lies in a folder, by name; nothing where there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
