"""The files in which a machine describes itself; tests substitute their own trees of files."""

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
    """The files and settings used to find cards and SSDs.

    Args:
        sysfs: Folder of the kernel's devices.
        mountinfo: File that lists the mounts that this process sees.
        maps: File that lists the libraries that this process has loaded.
        dev: Folder of device nodes.
        environment: Environment variables of this process.
        may_use: Function that returns whether this user may read and write a device node.
    """

    sysfs: Path = Path("/sys")
    mountinfo: Path = Path("/proc/self/mountinfo")
    maps: Path = Path("/proc/self/maps")
    dev: Path = Path("/dev")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    may_use: Callable[[Path], bool] = _may_use

    @property
    def emulated(self) -> bool:
        """Whether XRT emulates its devices; sysfs does not list emulated devices."""
        return bool(self.environment.get("XCL_EMULATION_MODE"))


def text_of(path: Path) -> str | None:
    """Return a small file's text without surrounding white space; ``None`` if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted by name; none if the folder does not exist."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
