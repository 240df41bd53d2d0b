"""JSON files with checksums of other files, which have a format version and a checksum of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning_smartinfinity import __version__
from lightning_smartinfinity.common.versions import unreadable
from lightning_smartinfinity.errors import CheckpointError, UnsupportedError
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.sealed import crc32c
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import CHECKSUMS_VERSION
from lightning_smartinfinity.zero3.checkpoints.formats.trust import require_file

__all__ = ["read_sealed", "write_sealed"]

T = TypeVar("T")

_DAMAGED = (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError)


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file with this content, the versions of the format and of the package, and a checksum of all of it.

    Raises:
        OSError: The file cannot be written.
    """
    content = {**content, "package": __version__, "version": CHECKSUMS_VERSION}
    path.write_text(json.dumps({**content, "crc32c": _seal(content)}, indent=1, sort_keys=True) + "\n")


def read_sealed(path: Path, decode: Callable[[Mapping[str, Any]], T], *, remedy: str) -> T | None:
    """Read and decode a file that :func:`write_sealed` has written; return None if there is none.

    Args:
        path: The file.
        decode: Function that takes the content, and raises a ``ValueError`` or the like if a value is not as expected.
        remedy: What the user can do if the file is damaged.

    Raises:
        CheckpointError: The file is damaged.
        UnsupportedError: A newer version of this package wrote it.
        StorageError: It cannot be read.
    """
    require_file(path)
    with storage_errors("Reading", path):
        try:
            text = limited("Reading", path, path.read_bytes)
        except FileNotFoundError:
            return None
    try:
        content = json.loads(text)
        if content.pop("crc32c") != _seal(content):
            raise ValueError("its own checksum is wrong")
        version = int(content["version"])
        if version <= CHECKSUMS_VERSION:
            return decode(content)
    except _DAMAGED as error:  # a plain ValueError has words of its own
        fault = error if type(error) is ValueError else "its content is not what this package writes"
        raise CheckpointError(f"{path} is damaged: {fault}.", remedy) from error
    writer, reads = str(content.get("package", "")), (CHECKSUMS_VERSION, CHECKSUMS_VERSION)
    problem, use = unreadable(str(path), version=version, reads=reads, writer=writer)
    raise UnsupportedError(problem, f"{use}. {remedy}")


def _seal(content: Mapping[str, Any]) -> str:
    return f"{crc32c(json.dumps(content, sort_keys=True).encode()):08x}"
