"""Opens a rank's state when DeepSpeed's optimizer is built: partition, storage, gradients, activations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientWindows
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout, build_layout
from lightning_smartinfinity.pipeline.parameters.cuda import link_to
from lightning_smartinfinity.pipeline.rules import UpdateRule
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.zero3.optimizer.persistence import begin_write_back
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.parameters.partition import Partition, describe_partition
from lightning_smartinfinity.zero3.ranks.collectives import all_come, raising_together, writing_group
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.activations import open_activations
from lightning_smartinfinity.zero3.setup.archiving import put_together
from lightning_smartinfinity.zero3.setup.open_storage import (
    gradient_store,
    open_storage,
    with_gradient_budget,
)
from lightning_smartinfinity.zero3.setup.reopening import as_stored
from lightning_smartinfinity.zero3.setup.ring import with_ring
from lightning_smartinfinity.zero3.setup.state_in_memory import claim_cache
from lightning_smartinfinity.zero3.untyped import ZeroOptimizer

__all__ = ["open_state"]

_log = logging.getLogger(__name__)


def open_state(
    optimizer: ZeroOptimizer,
    rank_state: RankState,
    offload: OffloadSettings,
    rule: UpdateRule,
    *,
    first_values: Sequence[float],
    await_gradients: Callable[[Sequence[int]], None],
) -> OffloadSettings:
    """Open the state of an optimizer whose sub-groups DeepSpeed has created. Collective.

    Args:
        optimizer: DeepSpeed's optimizer.
        rank_state: Receives the partition and all that is opened, also if the rest fails.
        offload: Where optimizer state is stored and how it is transferred.
        rule: The update rule of the user's optimizer.
        first_values: Initial values of the rule's arrays other than the master.
        await_gradients: Function that waits until the update in flight has used the gradients of some parameters,
            given by their indices.

    Returns:
        The settings with the ring and the gradient budget that were chosen.
    """
    group, dtype = optimizer.dp_process_group, optimizer.gradient_accumulation_dtype
    layout = build_layout(
        describe_partition(optimizer),
        tasklet_bytes=offload.tasklet_bytes,
        num_arrays=len(rule.arrays),
        num_devices=len(offload.storage),
        places_per_tasklet=offload.transfer.places_per_tasklet,
        state_format=offload.state_format,
    )
    if offload.resumes:
        put_together(offload, group)
        layout = as_stored(layout, offload, group)
    offload = with_ring(offload, layout, group)
    offload = with_gradient_budget(offload, layout, itemsize=dtype.itemsize, group=group)
    layout, cache = claim_cache(layout, offload, group, itemsize=dtype.itemsize)
    rank_state.partition = Partition(optimizer, layout)
    rank_state.partition.zero_padding()
    handler = open_storage(
        offload,
        layout,
        rule,
        dtype=optimizer.dtype,
        gradient_dtype=dtype,
        groups=optimizer.optimizer.param_groups,
        masters=rank_state.partition.outputs(by_cuda=offload.cards is None),
        first_values=first_values,
        memory=cache,
        group=group,
    )
    rank_state.hold_handler(handler)
    begin_write_back(handler, offload.transfer, group)
    if handler.writes_back and dist.get_world_size(group) > 1:
        rank_state.keeping.all_come = partial(all_come, group=writing_group())
    link = link_to(torch.device(get_accelerator().current_device_name()))
    memory = None
    with raising_together(group):
        rank_state.activations = open_activations(offload, group)
        threads = offload.transfer.compute_threads
        assert isinstance(threads, int), "the number was chosen before the training"
        with storage_errors("Allocating memory for gradients of", offload.storage[0]):
            if offload.gradient_budget is not None:
                memory = _windows(layout, offload, dtype, direct=handler.has_direct_io, await_gradients=await_gradients)
            rank_state.arena = GradientArena(layout, dtype=dtype, link=link, memory=memory, num_threads=threads)
            rank_state.compressed = _compressed(layout, offload, rank_state.arena)
    if offload.resumes:
        rank_state.keeping.resumable = True
        _read_parameters(rank_state)
    return offload


def _windows(
    layout: PartitionLayout,
    offload: OffloadSettings,
    dtype: torch.dtype,
    *,
    direct: bool,
    await_gradients: Callable[[Sequence[int]], None],
) -> GradientWindows:
    assert offload.gradient_budget is not None, "without a budget all gradients are in memory"
    if offload.transfer.gradient_bytes == "auto":
        nbytes = layout.numel * dtype.itemsize
        _log.info(
            "gradient_bytes='auto': %d of %d bytes of gradients are held in memory.", offload.gradient_budget, nbytes
        )
    return GradientWindows(
        layout,
        dtype,
        budget_bytes=offload.gradient_budget,
        store=gradient_store(offload, direct=direct),
        await_use=lambda tasklet: await_gradients(layout.parameters_in([tasklet]).tolist()),
    )


def _compressed(layout: PartitionLayout, offload: OffloadSettings, arena: GradientArena) -> CompressedGradients | None:
    if offload.compression is None:
        return None
    device = torch.device(get_accelerator().current_device_name())
    return CompressedGradients(
        layout,
        offload.compression,
        gradients=arena.buffer,
        num_threads=offload.feed_back_threads,
        device=device if device.type == "cuda" else None,
    )


def _read_parameters(rank_state: RankState) -> None:
    """Set all parameters to their masters on storage. Collective."""
    with raising_together(rank_state.partition.group):
        rank_state.handler.state.scan(
            lambda window: rank_state.partition.write(window.begin, torch.from_numpy(window.arrays[0]))
        )
