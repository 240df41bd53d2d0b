"""The self-test's files near a storage folder, and errors that name the card and the folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.discovery.cards import Card
from lightning_smartinfinity.devices.smartssd.opening import remedy_for
from lightning_smartinfinity.errors import DeviceError, StorageError
from lightning_smartinfinity.storage.folders.direct import adopt_descriptor
from lightning_smartinfinity.storage.folders.replacement import flush
from lightning_smartinfinity.storage.io.os_errors import storage_error, storage_errors

__all__ = ["Scratch", "scratch_folder"]


class Scratch:
    """A temporary folder on the file system of a storage folder.

    Args:
        card: Card that is tested.
        storage: The storage folder, which need not exist yet.
        path: The temporary folder. It is removed before a user reads an error, so errors name the card and ``storage``.
    """

    def __init__(self, card: Card, storage: Path, path: Path) -> None:
        self.card = card
        self._storage = storage
        self._path = path

    def fill(self, name: str, content: NDArray[np.uint8]) -> None:
        """Create a file, and wait until it is on storage."""
        with self._errors("writing a file in"):
            path = self._path / name
            path.write_bytes(content.tobytes())
            flush(path)

    def open(self, name: str) -> native.StateFile:
        """Open a file for P2P and the native core."""
        with self._errors("opening a file in"):
            path = self._path / name
            return adopt_descriptor(path, os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC), direct=True)

    def read(self, name: str) -> bytes:
        """Read a file from storage or the page cache."""
        with self._errors("reading a file in"):
            return (self._path / name).read_bytes()

    def error_of(self, failure: native.Failure) -> DeviceError | StorageError:
        """Convert a failure of the native core to one of the package's errors."""
        problem = f"Self-test of the {self.card.label} in {str(self._storage)!r}: {self.shortened(failure.message)}."
        if failure.kind in ("io", "short"):
            return storage_error(failure.errno, problem=problem)
        return DeviceError(problem, remedy_for(failure.message))

    def shortened(self, message: str) -> str:
        """Shorten the paths in a message to the files' names."""
        return message.replace(f"{self._path}/", "")

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return storage_errors(f"Self-test of the {self.card.label}: {doing}", self._storage)


@contextmanager
def scratch_folder(card: Card, storage: Path) -> Iterator[Scratch]:
    """Create a temporary folder on the file system of a storage folder, and remove it at the end.

    Args:
        card: Card that is tested.
        storage: The storage folder, absolute; it need not exist yet.

    Raises:
        StorageError: A file exists in place of a folder, or no folder can be created.
    """
    with storage_errors(f"Self-test of the {card.label}: making a folder in", storage):
        present = next(path for path in (storage, *storage.parents) if path.exists())
        scratch = tempfile.TemporaryDirectory(prefix=".smart-infinity-", dir=present)
    with scratch as name:
        yield Scratch(card, storage, Path(name))
