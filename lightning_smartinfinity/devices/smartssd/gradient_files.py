"""The file on a card's SSD through which gradients are sent with ``gradient_route="storage"``."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.storage.folders.direct import adopt_descriptor, make_direct
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.io.files import bounded
from lightning_smartinfinity.storage.io.os_errors import storage_errors

__all__ = ["open_gradient_file"]

_NAME = "gradients.tmp"


def open_gradient_file(folder: Path, nbytes: int, resources: ExitStack) -> native.StateFile:
    """Create the file without a name, so that it is never left over and never collides with another file.

    Args:
        folder: The rank's folder on the card's SSD.
        nbytes: Size of the file, all of which is allocated.
        resources: Stack that closes the file.

    Raises:
        StorageFullError: There is not enough space.
        StorageTimeoutError: The disk does not answer.
        StorageError: The file cannot be created.
    """
    file = _create(folder / _NAME, nbytes)
    resources.callback(file.close)
    return file


@bounded("Creating", undo=native.StateFile.close)
def _create(path: Path, nbytes: int) -> native.StateFile:
    """Create the file; its path is only for messages."""
    with storage_errors(f"Allocating {nbytes} bytes for", path), closing(OpenFolder(path.parent)) as inside:
        descriptor = inside.open_unnamed()
        try:
            make_direct(descriptor)
            os.posix_fallocate(descriptor, 0, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        return adopt_descriptor(path, descriptor, direct=True)
