"""Offloads activations that a training engine's forward saves for backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch.distributed import ProcessGroup

from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["offloading", "open_activations"]


def open_activations(settings: OffloadSettings, group: ProcessGroup | None) -> OffloadedActivations | None:
    """Return the activation offloading of the settings, with its files open; None if activations stay in memory.

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


@contextmanager
def offloading(activations: OffloadedActivations, *passing: object) -> Iterator[None]:
    """Offload tensors saved for backward in this context; warn if DeepSpeed's checkpointing keeps some in memory.

    Args:
        activations: The offloading.
        *passing: Tensors, also in nested containers, that are not offloaded.
    """

    def count(forward: Callable[..., Any], *inputs: object) -> Any:
        if not activations.hidden_bytes:
            warnings.warn(
                "deepspeed.checkpointing keeps the inputs of checkpoints in memory, where nothing can offload them. "
                "Use torch.utils.checkpoint, whose inputs move to storage.",
                stacklevel=2,
            )
        activations.hidden_bytes += sum(each.nbytes for each in inputs if isinstance(each, torch.Tensor))
        return forward(*inputs)

    with wrapped(checkpointing.CheckpointFunction, "forward", count), activations.forward(*passing):
        yield


def _gather(parameter: ZeroParameter) -> None:
    """Gather a parameter that was released between forward and backward; the step releases it again."""
    parameter.all_gather()
