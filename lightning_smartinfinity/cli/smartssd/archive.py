"""Packs the results of ``smart-infinity card-report`` into an archive, without the machine's identity."""

from __future__ import annotations

import getpass
import io
import json
import os
import re
import socket
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["end_of", "pack", "without_identity"]

_MOST_BYTES = 1 << 20  # of a log

_SERIAL = re.compile(r"(serial(?:[ _-]?(?:number|no))?[^\w\n]{1,40})[\w.-]+", re.IGNORECASE)


def pack(archive: Path, results: Mapping[str, Any], *, logs: Mapping[str, Path], places: Mapping[str, str]) -> None:
    """Write one JSON file per stage and the end of each log to a ``.tar.gz``, whose entries have no owner.

    An existing archive is replaced only when the new one is complete.

    Args:
        archive: File to write.
        results: Result of each stage.
        logs: Text files by their names in the archive; the last mebibyte of each is packed.
        places: Paths that may identify the owner of the machine, and the word that replaces each.
    """
    texts = {f"{name}.json": json.dumps(without_identity(result, places), indent=2) for name, result in results.items()}
    texts |= {_anonymous(f"logs/{name}", places): _anonymous(end_of(path), places) for name, path in logs.items()}
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
    """Return the last mebibyte of a text file, or why it cannot be read; undecodable bytes are replaced."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def without_identity(value: Any, places: Mapping[str, str]) -> Any:
    """Return JSON data without the names of host, user, home folders, serial numbers and the given places."""
    if isinstance(value, dict):
        return {name: without_identity(part, places) for name, part in value.items()}
    if isinstance(value, list):
        return [without_identity(part, places) for part in value]
    return _anonymous(value, places) if isinstance(value, str) else value


def _anonymous(text: str, places: Mapping[str, str]) -> str:
    known = {**places, os.path.expanduser("~"): "HOME"}
    for place in sorted(known.keys() - {"/", "~"}, key=len, reverse=True):  # places may be nested
        text = text.replace(place, known[place])
    text = re.sub(r"/(?:home|Users)/[^/\s:'\"]+|/root\b", "HOME", text)
    for pattern, word in _names():
        text = re.sub(rf"(?<!\w){pattern}(?!\w)", word, text, flags=re.IGNORECASE)
    return _SERIAL.sub(r"\1SERIAL", text)


def _names() -> Iterator[tuple[str, str]]:
    """Yield patterns for this machine's name, with or without domain, and its users' names, with replacements."""
    host, users = socket.gethostname().partition(".")[0], {os.environ.get("SUDO_USER", "")}
    with suppress(KeyError, OSError):  # a user id without a name
        users.add(getpass.getuser())
    if host != "localhost":
        yield rf"{re.escape(host)}(?:\.[a-z][\w-]*)*", "HOST"
    for user in users - {"", "root"}:
        yield re.escape(user), "USER"
