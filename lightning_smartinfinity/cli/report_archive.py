"""Packs the results of ``smart-infinity card-report`` into an archive, without the machine's identity."""

from __future__ import annotations

import getpass
import io
import json
import re
import socket
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["end_of", "pack", "without_identity"]

_MOST_BYTES = 1 << 20  # of a log

_SERIAL = re.compile(r"(serial(?:[ _-]?(?:number|no))?\W{1,5})[\w.-]+", re.IGNORECASE)


def pack(archive: Path, results: Mapping[str, Any], *, logs: Mapping[str, Path], places: Mapping[str, str]) -> None:
    """Write one JSON file for each stage, and the end of each log, to a ``.tar.gz``, whose entries have no owner.

    An archive that is there stays whole until the new one is.

    Args:
        archive: File to write.
        results: Result of each stage.
        logs: Text files, of which the last mebibyte is packed, by their names in the archive.
        places: Paths that may tell who owns the machine, and the word to write for each.
    """
    texts = {f"{name}.json": json.dumps(without_identity(result, places), indent=2) for name, result in results.items()}
    texts |= {f"logs/{name}": _anonymous(end_of(path), places) for name, path in logs.items()}
    unfinished = archive.with_name(f"{archive.name}.new")
    try:
        with tarfile.open(unfinished, "w:gz") as packed:
            for name, text in texts.items():
                content = text.encode()
                entry = tarfile.TarInfo(f"card-report/{name}")
                entry.size = len(content)
                packed.addfile(entry, io.BytesIO(content))
        unfinished.replace(archive)
    finally:
        unfinished.unlink(missing_ok=True)


def end_of(path: Path) -> str:
    """Return the last mebibyte of a text file, or all of it; bytes that are no text are replaced."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES).decode(errors="replace")


def without_identity(value: Any, places: Mapping[str, str]) -> Any:
    """Return JSON data in which no text names the host, the user, a home, a serial number or one of the places."""
    if isinstance(value, dict):
        return {name: without_identity(part, places) for name, part in value.items()}
    if isinstance(value, list):
        return [without_identity(part, places) for part in value]
    return _anonymous(value, places) if isinstance(value, str) else value


def _anonymous(text: str, places: Mapping[str, str]) -> str:
    for place in sorted(places, key=len, reverse=True):  # a place may lie in another
        text = text.replace(place, places[place])
    text = re.sub(r"/(?:home|Users)/[^/\s:'\"]+|/root\b", "HOME", text.replace(str(Path.home()), "HOME"))
    host = socket.gethostname()
    for name, word in ((host, "HOST"), (host.partition(".")[0], "HOST"), (getpass.getuser(), "USER")):
        if name not in ("root", "localhost"):  # these tell nothing
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", word, text)
    return _SERIAL.sub(r"\1SERIAL", text)
