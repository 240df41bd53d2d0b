"""CRC-32C checksums of small files that another program stores in a checkpoint, in a file next to them.

transformers' Trainer and Accelerate store progress, schedulers and the random states of each rank in files without
checksums. The file, in JSON, where each checksum is 8 hexadecimal digits::

    {
      "about": "...",
      "crc32c": "...",                                of everything else in this file
      "files": {"scheduler.pt": {"crc32c": "...", "nbytes": 1465}},
      "package": "0.1.0.dev5",                        version of this package that wrote it
      "version": 1
    }

Later versions must keep ``crc32c``, ``package`` and ``version``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_smartinfinity.storage.folders.replacement import beside, flush
from lightning_smartinfinity.storage.io.files import bounded, limited
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.records.sealed import crc32c
from lightning_smartinfinity.zero3.checkpoints.formats.sealed_json import read_sealed, write_sealed
from lightning_smartinfinity.zero3.checkpoints.formats.trust import require_file

__all__ = ["FILE_CHECKSUMS_NAME", "FileChecksums", "read_file_checksums", "write_file_checksums"]

FILE_CHECKSUMS_NAME = "smart_infinity_file_checksums.json"
"""Name of the file, in the folder of the checkpoint."""

_ABOUT = (
    "Checksums of small files in this checkpoint. A resume and `smart-infinity scrub FOLDER` compare them. Delete this "
    "file if you change the others."
)


@dataclass(frozen=True)
class FileChecksums:
    """The checksums of files in a folder.

    Args:
        folder: The folder.
        files: Checksum and number of bytes of each file, by its name.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]

    def damage(self) -> Iterator[str]:
        """Read all files, and yield a sentence about each that is damaged or missing.

        Raises:
            CheckpointError: One is a pipe or the like.
            StorageError: One cannot be read.
        """
        for name, (checksum, nbytes) in self.files.items():
            path = self.folder / name
            require_file(path)
            with storage_errors("Reading", path):
                try:
                    content = limited("Reading", path, path.read_bytes)
                except FileNotFoundError:
                    yield f"{path} is missing."
                    continue
            if len(content) != nbytes or crc32c(content) != checksum:
                yield f"{path} is damaged, or another program changed it after the save: its checksum is wrong."


@bounded("Writing checksums to")
def write_file_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of files in a folder, and flush the file with them; then put it in its place.

    Flush the files before, and the folder afterwards: then, if the checksums exist, the files were whole.

    Args:
        folder: The folder.
        names: The names of the files, which all exist.

    Raises:
        OSError: A file cannot be read, or the checksums cannot be written.
        StorageTimeoutError: The disk does not answer.
    """
    contents = {name: (folder / name).read_bytes() for name in names}
    files = {name: {"crc32c": f"{crc32c(each):08x}", "nbytes": len(each)} for name, each in contents.items()}
    target = folder / FILE_CHECKSUMS_NAME
    write_sealed(beside(target), {"about": _ABOUT, "files": files})
    flush(beside(target))
    os.replace(beside(target), target)


def read_file_checksums(folder: Path) -> FileChecksums | None:
    """Read the checksums of files in a folder; return None if there are none.

    Raises:
        CheckpointError: The file with the checksums is damaged.
        UnsupportedError: A newer version of this package wrote it.
        StorageError: It cannot be read.
    """
    path = folder / FILE_CHECKSUMS_NAME
    files = read_sealed(path, _files_in, remedy=f"Use another checkpoint, or delete {path}: then nothing is compared.")
    return None if files is None else FileChecksums(folder, files)


def _files_in(content: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    files = {name: (int(saved["crc32c"], 16), int(saved["nbytes"])) for name, saved in content["files"].items()}
    if any(Path(name).name != name for name in files):
        raise ValueError("it names a file in another folder")
    return files
