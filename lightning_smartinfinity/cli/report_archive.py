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

__all__ = ["pack", "without_identity"]

_SERIAL = re.compile(r"(serial(?:[ _-]?(?:number|no))?\W{1,5})[\w.-]+", re.IGNORECASE)


def pack(archive: Path, results: Mapping[str, Any], *, places: Mapping[str, str]) -> None:
    """Write one JSON file for each stage to a ``.tar.gz``, whose entries have no owner.

    Args:
        archive: File to write.
        results: Result of each stage.
        places: Paths that may tell who owns the machine, and the word to write for each.
    """
    with tarfile.open(archive, "w:gz") as packed:
        for name, result in results.items():
            text = json.dumps(without_identity(result, places), indent=2).encode()
            entry = tarfile.TarInfo(f"card-report/{name}.json")
            entry.size = len(text)
            packed.addfile(entry, io.BytesIO(text))


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
