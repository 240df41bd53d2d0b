"""Finds the resources of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from lightning_smartinfinity.common.machine import available_cores
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.layout.free_memory import measure_memory
from lightning_smartinfinity.planning.choice import Resources
from lightning_smartinfinity.storage.io.mounts import is_in_memory

__all__ = ["survey_resources"]


def survey_resources(storage: Path) -> Resources:
    """Return the GPUs, memory, cores and disk that a training on this machine may use.

    Host memory is the memory available now, within the limits of the process's control groups.

    Args:
        storage: The storage folder, which need not exist.

    Raises:
        StorageError: The disk of the folder cannot be read.
    """
    try:
        existing = _existing(storage.absolute())
        if not existing.is_dir():
            raise NotADirectoryError(f"{str(existing)!r} is no folder")
        disk = shutil.disk_usage(existing)
    except OSError as error:
        raise StorageError(f"The disk of {str(storage)!r} cannot be read: {error}.", "Pass --storage.") from error
    memory = measure_memory(reserved=0)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Resources(
        host_memory=memory.available,
        kept_free=memory.margin,
        storage_is_memory=is_in_memory(existing),
        disk=disk.free,
        cores=available_cores(),
        gpu_memory=torch.cuda.get_device_properties(0).total_memory if num_gpus else None,
        num_gpus=num_gpus,
        drive_bytes=disk.total,
    )


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
