"""Files that a self-test makes beside a storage folder, and its failures in words of the card and the folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.cards import Card
from lightning_smartinfinity.devices.smartssd.opening import remedy_for
from lightning_smartinfinity.errors import DeviceError, StorageError
from lightning_smartinfinity.store.os_errors import storage_error, storage_errors

__all__ = ["Scratch", "scratch_folder"]


class Scratch:
    """A folder of our own on the file system of a storage folder.

    Args:
        card: That is tested.
        storage: The storage folder, there already or not.
        path: The folder of our own: gone by the time that a user reads of a failure, which names the other two.
    """

    def __init__(self, card: Card, storage: Path, path: Path) -> None:
        self.card = card
        self._storage = storage
        self._path = path

    def fill(self, name: str, content: NDArray[np.uint8]) -> None:
        """Make a file that is on storage when this returns."""
        with self._errors("writing a file in"):
            path = self._path / name
            path.write_bytes(content.tobytes())
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def open(self, name: str) -> native.StateFile:
        """Open a file for P2P and the native core."""
        with self._errors("opening a file in"):
            return native.StateFile(str(self._path / name), direct=True)

    def read(self, name: str) -> bytes:
        """Read a file from storage or the page cache."""
        with self._errors("reading a file in"):
            return (self._path / name).read_bytes()

    def error_of(self, failure: native.Failure) -> DeviceError | StorageError:
        """What the native core could not do, as our own error."""
        problem = f"Self-test of the {self.card.label} in {str(self._storage)!r}: {self.told(failure.message)}."
        if failure.kind in ("io", "short"):
            return storage_error(failure.errno, problem=problem)
        return DeviceError(problem, remedy_for(failure.message))

    def told(self, message: str) -> str:
        """A message that names files by their names alone."""
        return message.replace(f"{self._path}/", "")

    def _errors(self, doing: str) -> AbstractContextManager[None]:
        return storage_errors(f"Self-test of the {self.card.label}: {doing}", self._storage)


@contextmanager
def scratch_folder(card: Card, storage: Path) -> Iterator[Scratch]:
    """A folder on the file system of a storage folder, which need not be there yet; it is removed.

    Args:
        card: That is tested.
        storage: The storage folder, absolute.

    Raises:
        StorageError: A file stands where a folder should be, or no folder can be made.
    """
    with storage_errors(f"Self-test of the {card.label}: making a folder in", storage):
        present = next(path for path in (storage, *storage.parents) if path.exists())
        scratch = tempfile.TemporaryDirectory(prefix=".smart-infinity-", dir=present)
    with scratch as name:
        yield Scratch(card, storage, Path(name))
