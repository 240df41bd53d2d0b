"""Checks the direction of includes in the native core: a room includes itself and the rooms below it, by path.

    python tools/include_contracts.py [FOLDER]  # the checkout by default

Prints each include that breaks a rule, and each file outside a room, and fails if there are any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["ROOMS", "violations"]

ROOMS = (
    "base",
    "kernels",
    "checksum",
    "io",
    "extent",
    "gradient",
    "cuda",
    "pipeline",
    "card",
    "testing",
    "module",
)
"""Rooms of the native core, from the bottom to the top."""
SOURCES = Path("lightning_smartinfinity/native/src")
GENERATED = frozenset({"kernels/update_rules.hpp"})
"""Headers that the build generates, see CMakeLists.txt."""
EMULATOR = Path("hls/emulator")
ONLY_USER_OF_TESTING = "module/bind_testing.cpp"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def main() -> None:
    """Checks a checkout."""
    found = violations(Path(*sys.argv[1:2]))
    sys.exit("\n".join(found) or None)


def violations(folder: Path) -> list[str]:
    """Lists the includes and files of a checkout that break a rule."""
    core = folder / SOURCES
    files = sorted(path.relative_to(core) for path in core.rglob("*") if path.is_file())
    known = {str(file) for file in files}
    found = []
    for file in files:
        if len(file.parts) != 2 or file.parts[0] not in ROOMS:
            found.append(f"{SOURCES / file} lies outside the rooms {', '.join(ROOMS)}")
            continue
        for included in includes(core / file):
            problem = problem_of(str(file), included) if included in known | GENERATED else "is no path below src/"
            if problem:
                found.append(f'{SOURCES / file}: "{included}" {problem}')
    for path in sorted((folder / EMULATOR).rglob("*.[ch]pp")):
        for included in includes(path):
            if included in known and not included.startswith("base/"):
                found.append(f'{path.relative_to(folder)}: "{included}" is not in base/')
    return found


def includes(path: Path) -> list[str]:
    """Returns the paths that a file includes in quotation marks."""
    return INCLUDE.findall(path.read_text())


def problem_of(file: str, included: str) -> str | None:
    """Returns why a file of the core may not include another, or None if it may."""
    room, below = file.split("/")[0], included.split("/")[0]
    if ROOMS.index(below) > ROOMS.index(room):
        return f"is above {room}/"
    if below == "testing" and room != "testing" and file != ONLY_USER_OF_TESTING:
        return f"is for {ONLY_USER_OF_TESTING} and tests only"
    return None


if __name__ == "__main__":
    main()
