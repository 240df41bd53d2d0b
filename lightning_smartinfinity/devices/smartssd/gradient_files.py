"""The file on a card's SSD that gradients travel through with ``gradient_route="storage"``."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.store.os_errors import storage_errors

__all__ = ["open_gradient_file"]

_NAME = "gradients.tmp"


def open_gradient_file(folder: Path, nbytes: int, resources: ExitStack) -> native.StateFile:
    """Create the file and unlink it once it is open, so that nothing is left behind.

    Args:
        folder: The rank's folder on the card's SSD.
        nbytes: Size of the file, all of which is allocated.
        resources: Stack that closes the file.

    Raises:
        StorageFullError: There is too little space.
        StorageError: The file cannot be created.
    """
    path = folder / _NAME
    with storage_errors(f"Allocating {nbytes} bytes for", path):
        path.unlink(missing_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
            finally:
                os.close(descriptor)
            file = native.StateFile(str(path), direct=True)
        finally:
            path.unlink(missing_ok=True)
    resources.callback(file.close)
    return file
