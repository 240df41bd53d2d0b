"""Checks the direction of includes in the native core: a room includes itself and the rooms below it, by path.

    python tools/include_contracts.py [FOLDER]  # the checkout by default

Of the core, hls/emulator includes base/ only, and the rest of hls/ nothing. docs/native_core.md lists the same rooms.
Prints everything that breaks a rule, and fails if there is anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path

__all__ = ["ROOMS", "violations"]

ROOMS = (
    "base",
    "watch",
    "kernels",
    "checksum",
    "io",
    "extent",
    "gradient",
    "cuda",
    "tensor",
    "pipeline",
    "card",
    "testing",
    "module",
)
"""Rooms of the native core, from the bottom to the top."""
SOURCES = Path("lightning_smartinfinity/native/src")
GENERATED = frozenset({"kernels/update_rules.hpp"})
"""Headers that the build generates, see CMakeLists.txt."""
HLS = Path("hls")
HLS_HEADERS = (HLS / "include", HLS / "kernels", HLS / "sim/include", HLS / "emulator")
PAGE = Path("docs/native_core.md")
ONLY_USER_OF_TESTING = "module/bind_testing.cpp"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)
ROW = re.compile(rf"^\| `native/{SOURCES.name}/(\w+)/` \|", re.MULTILINE)


def main() -> None:
    """Check a checkout."""
    found = [*violations(Path(*sys.argv[1:2]))]
    sys.exit("\n".join(found) or None)


def violations(folder: Path) -> Iterator[str]:
    """Yield the includes, files and rooms of a checkout that break a rule."""
    rooms = tuple(ROW.findall((folder / PAGE).read_text()))
    if rooms != ROOMS:
        yield f"{PAGE} lists the rooms {', '.join(rooms)}, {Path(__file__).name} {', '.join(ROOMS)}"
    for path in files(folder / SOURCES):
        file = path.relative_to(folder / SOURCES)
        if len(file.parts) != 2 or file.parts[0] not in ROOMS:
            yield f"{SOURCES / file} lies outside the rooms {', '.join(ROOMS)}"
            continue
        for name, included in includes(path, folder):
            problem = problem_of(str(file), name) if included == name else "is no path below src/"
            if problem:
                yield f'{SOURCES / file}: "{name}" {problem}'
    for path in files(folder / HLS):
        file = path.relative_to(folder)
        for name, included in includes(path, folder, *HLS_HEADERS):
            if included is not None and not (file.is_relative_to(HLS / "emulator") and included.startswith("base/")):
                yield f'{file}: "{name}" is of the core and not in base/, which only hls/emulator includes'


def files(folder: Path) -> list[Path]:
    """List the files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")


def includes(path: Path, folder: Path, *headers: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the names that a file includes, and where they are in the core: None for a file outside it.

    The system's headers, in angle brackets, are left out.
    """
    core = Path(normpath(folder / SOURCES))
    generated = {core / header for header in GENERATED}
    for bracket, name in INCLUDE.findall(path.read_text(errors="ignore")):
        places = [*([path.parent] if bracket == '"' else []), *(folder / header for header in headers), core]
        candidates = (Path(normpath(place / name)) for place in places)
        found = next((each for each in candidates if each.is_file() or each in generated), None)
        if found and found.is_relative_to(core):
            yield name, found.relative_to(core).as_posix()
        elif found or bracket == '"':
            yield name, None


def problem_of(file: str, included: str) -> str | None:
    """Return why a file of the core may not include another, or None if it may."""
    room, below = file.split("/")[0], included.split("/")[0]
    if ROOMS.index(below) > ROOMS.index(room):
        return f"is above {room}/"
    if below == "testing" and room != "testing" and file != ONLY_USER_OF_TESTING:
        return f"is for {ONLY_USER_OF_TESTING} and tests only"
    return None


if __name__ == "__main__":
    main()
