"""Access to files without names, which this process has open."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def unnamed_files(folder: Path) -> list[Path]:
    """Return paths, which can be opened, of this process's files without names that were made below a folder."""
    found: dict[str, Path] = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was that of the list
            target = os.readlink(link)
            if target.startswith(f"{folder}/") and target.endswith(" (deleted)"):
                found[target] = link
    return [found[target] for target in sorted(found)]
