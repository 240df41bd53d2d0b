"""Opens the storage of what a training's forward saves for backward."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["open_activations"]


def open_activations(settings: OffloadSettings, group: ProcessGroup | None) -> OffloadedActivations | None:
    """Return the offloading that the settings ask for, with its files open; None if activations stay in memory.

    Args:
        settings: Folders and settings.
        group: Process group of all ranks.

    Raises:
        StorageError: A file cannot be created.
    """
    if settings.activations is None:
        return None
    opened = OffloadedActivations(
        settings.storage,
        settings=settings.activations,
        transfer=settings.transfer,
        gather=_gather,
        # If one rank raised within backward, the others would wait for it in the next gather.
        notes_failures=dist.get_world_size(group) > 1,
    )
    opened.open()
    return opened


def _gather(parameter: ZeroParameter) -> None:
    """Gather a parameter that was released between forward and backward; the end of the step releases it."""
    parameter.all_gather()
