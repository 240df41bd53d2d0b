"""CRC-32C checksums of the weights in an exported folder, in a file next to them.

Safetensors files have no checksums of their own. This file covers every byte of the files with weights and of their
index, in blocks, so that a reader of one tensor verifies only the blocks of that tensor. The bytes before the first
tensor of a safetensors file are its header: names, shapes and dtypes. Small files such as config.json are left out,
because users change them. The file, in JSON::

    {
      "about": "...",
      "block_bytes": 4194304,
      "crc32c": "8 hexadecimal digits",               of everything else in this file
      "files": {
        "model.safetensors": {
          "__metadata__": {"crc32c": "...", "nbytes": 528, "offset": 0},
          "lm_head.weight": {"crc32c": "...", "nbytes": 4288, "offset": 528}
        }
      },
      "package": "0.1.0.dev5",                        version of this package that wrote it
      "version": 1
    }

Each part of a file has 8 hexadecimal digits per block. Later versions must keep ``crc32c``, ``package`` and
``version``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.common.progress import Advance
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.io.files import OpenFile, limited
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.sealed import crc32c
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import BLOCK_BYTES, num_blocks
from lightning_smartinfinity.zero3.checkpoints.formats.sealed_json import read_sealed, write_sealed
from lightning_smartinfinity.zero3.checkpoints.formats.trust import require_file

__all__ = [
    "CHECKSUMS_NAME",
    "HEADER",
    "ExportChecksums",
    "Part",
    "read_checksums",
    "write_checksums",
]

CHECKSUMS_NAME = "smart_infinity_checksums.json"
"""Name of the file, in the folder of the export."""

HEADER = "__metadata__"
"""Name of the part before the first tensor of a file. No tensor of a safetensors file can have it."""

_DIGITS = 8
_ABOUT = (
    "Checksums of the weights in this folder. `smart-infinity scrub FOLDER` compares them. Delete this file if you "
    "change the weights by another program."
)


class Part(NamedTuple):
    """Consecutive bytes of a file, which are verified together.

    Args:
        offset: Offset of the first byte in the file.
        nbytes: Number of bytes.
        checksums: CRC-32C of each :data:`BLOCK_BYTES` of the part, in order.
    """

    offset: int
    nbytes: int
    checksums: Sequence[int]


Files = Mapping[str, Mapping[str, Part]]
"""The parts of each file, by the name of the file and of the part: :data:`HEADER`, or a tensor."""


@dataclass(frozen=True)
class ExportChecksums:
    """The checksums of an exported folder.

    Args:
        folder: The folder.
        files: The parts of its files.
    """

    folder: Path
    files: Files

    def blocks(self, file: str, part: str) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the blocks of a part of a file, each after it was compared with its checksum.

        Args:
            file: Name of the file.
            part: Name of the part.

        Yields:
            The offset in the part, in bytes, and uint8[n] with a block, which is overwritten by the next one.

        Raises:
            CheckpointError: A block is damaged, or there is no checksum for the part.
            StorageError: The file cannot be read.
        """
        known = self.files.get(file, {}).get(part)
        path = self.folder / file
        if known is None:
            raise self._changed(f"{path} has no checksum for {part!r}: another program changed it after the export.")
        require_file(path)
        with storage_errors("Reading", path), closing(OpenFile(path, os.O_RDONLY)) as opened:
            buffer = np.empty(min(BLOCK_BYTES, known.nbytes), np.uint8)
            for begin, checksum in zip(range(0, known.nbytes, BLOCK_BYTES), known.checksums, strict=True):
                block = buffer[: known.nbytes - begin]
                num_read = opened.read_all(block.data, known.offset + begin)
                if num_read < block.size or crc32c(block) != checksum:
                    what = "its header" if part == HEADER else repr(part)
                    raise self._changed(
                        f"{path} is damaged, or another program changed it after the export: the checksum of {what} "
                        f"from byte {begin} on is wrong."
                    )
                yield begin, block

    def require(self, file: str, part: str) -> None:
        """Read a part of a file, and compare it with its checksums; raises as :meth:`blocks` does."""
        for _ in self.blocks(file, part):
            pass

    def damage(self, file: str, advance: Advance) -> Iterator[str]:
        """Read a whole file, and yield a sentence about each damaged part.

        Raises:
            StorageError: The file cannot be read.
        """
        path, parts = self.folder / file, self.files[file]
        nbytes = max((part.offset + part.nbytes for part in parts.values()), default=0)
        with storage_errors("Looking at", path):
            try:
                found = limited("Looking at", path, path.stat).st_size
            except FileNotFoundError:
                yield f"{path} is missing."
                return
        if found != nbytes:
            yield f"{path} has {found} bytes, and {nbytes} when it was exported."
            return
        for name in parts:
            try:
                for _, block in self.blocks(file, name):
                    advance(block.size)
            except CheckpointError as error:
                yield error.problem

    def _changed(self, problem: str) -> CheckpointError:
        path = self.folder / CHECKSUMS_NAME
        return CheckpointError(
            problem, f"Export again. If the change was intended, delete {path}: then nothing is compared."
        )


def write_checksums(folder: Path, files: Files) -> None:
    """Write the checksums of an export into its folder.

    Raises:
        OSError: The file cannot be written.
    """
    content = {
        "about": _ABOUT,
        "block_bytes": BLOCK_BYTES,
        "files": {file: {name: _saved(part) for name, part in parts.items()} for file, parts in files.items()},
    }
    write_sealed(folder / CHECKSUMS_NAME, content)


def read_checksums(folder: Path) -> ExportChecksums | None:
    """Read the checksums of an export; return None if its folder has none.

    Raises:
        CheckpointError: The file with the checksums is damaged.
        UnsupportedError: A newer version of this package wrote it.
        StorageError: It cannot be read.
    """
    path = folder / CHECKSUMS_NAME
    files = read_sealed(path, _files_in, remedy=f"Export again, or delete {path}: then nothing is compared.")
    return None if files is None else ExportChecksums(folder, files)


def _files_in(content: Mapping[str, Any]) -> Files:
    return {file: {name: _read(part) for name, part in parts.items()} for file, parts in content["files"].items()}


def _saved(part: Part) -> dict[str, object]:
    return {"offset": part.offset, "nbytes": part.nbytes, "crc32c": _hexadecimal(part.checksums)}


def _read(saved: Mapping[str, Any]) -> Part:
    digits: str = saved["crc32c"]
    checksums = [int(digits[at : at + _DIGITS], 16) for at in range(0, len(digits), _DIGITS)]
    part = Part(int(saved["offset"]), int(saved["nbytes"]), checksums)
    if min(part.offset, part.nbytes) < 0 or len(checksums) != num_blocks(part.nbytes):
        raise ValueError(f"a part of {part.nbytes} bytes at {part.offset} has {len(checksums)} checksums")
    return part


def _hexadecimal(checksums: Sequence[int]) -> str:
    return "".join(f"{checksum:0{_DIGITS}x}" for checksum in checksums)
