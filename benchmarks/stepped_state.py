"""Optimizer state on storage, with steps of the transfer handler over it but without a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from raw_disk import cpu_seconds

from lightning_smartinfinity.devices import HostDevice, StorageDevice
from lightning_smartinfinity.native import DType, HostBuffer, StateFile
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.layout.partition_layout import (
    ParameterSlice,
    PartitionLayout,
    build_layout,
    with_residents,
)
from lightning_smartinfinity.pipeline.layout.tensors import Flat
from lightning_smartinfinity.pipeline.parameters.partitions import HostPartition
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES, GradientCodec, TransferConfig
from lightning_smartinfinity.storage import StoreDescription, create_store

# The first optimizer of a process imports much of torch. This happens here, once, before processes are forked.
OPTIMIZER = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


class SteppedState:
    """Parameters in bf16 with their gradients in memory and their state on storage.

    Args:
        folders: Folders of the state, one for each device.
        numels: Elements of each parameter.
        state_format: A name in ``STATE_FORMATS``.
        transfer: Ring, engine and direct I/O.
        make_device: Function that makes the device that updates; None means the host.
        codec: Codec that compresses gradients.
        in_memory: Whether all state is in host memory, and steps do not write it to storage.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        numels: Sequence[int],
        *,
        state_format: str,
        transfer: TransferConfig,
        make_device: Callable[[PartitionLayout], StorageDevice] | None = None,
        codec: GradientCodec | None = None,
        in_memory: bool = False,
    ) -> None:
        parameters = [
            ParameterSlice(name=f"p{index}", numel=numel, real_numel=numel, group=0, sub_group=0)
            for index, numel in enumerate(numels)
        ]
        layout = build_layout(
            parameters,
            tasklet_bytes=transfer.buffer_bytes or HOST_TASKLET_BYTES,
            num_arrays=3,
            num_devices=len(folders),
            places_per_tasklet=transfer.places_per_tasklet,
            state_format=state_format,
        )
        if in_memory:
            layout = with_residents(layout, nbytes=sys.maxsize, written_through=True)
        rule = rule_for(OPTIMIZER)
        named = tuple({"name": parameter.name} for parameter in parameters)
        description = StoreDescription(optimizer=rule.name, arrays=rule.arrays, parameters=named)
        store = create_store(list(folders), config=transfer, extents=layout.extents, description=description)
        host = HostDevice(
            num_buffers=16 if transfer.num_buffers == "auto" else transfer.num_buffers,
            io_engine=transfer.io_engine,
            compute_threads=1 if transfer.compute_threads == "auto" else transfer.compute_threads,
        )
        device = host if make_device is None else make_device(layout)
        self._store = store
        self.handler = TransferHandler(layout, store, device, rule=rule)
        self.handler.open()
        self.numel = sum(numels)
        self._memory = [_bf16_memory(self.numel) for _ in range(2)]
        gradients, outputs = ([Flat(buffer.address, self.numel, DType.BFLOAT16)] for buffer in self._memory)
        self.handler.initialize(HostPartition(outputs))
        if in_memory:
            self.handler.write_back()
        compressed = None
        if codec is not None:
            memory = torch.frombuffer(self._memory[0].memoryview(), dtype=torch.bfloat16)
            compressed = CompressedGradients(layout, codec, gradients=memory, num_threads=1)
        self._plan = StepPlan(
            active=np.ones(len(parameters), np.bool_),
            gradients=gradients,
            outputs=HostPartition(outputs),
            groups=OPTIMIZER.param_groups,
            compressed=compressed,
        )

    def step(self) -> dict[str, float]:
        """Step once; return seconds, CPU seconds (of the process, and of updates alone), bytes read and written."""
        before, used, start = self.handler.traffic(), cpu_seconds(), time.perf_counter()
        self.handler.begin_step(self._plan)
        self.handler.commit()
        seconds, cpu, after = time.perf_counter() - start, cpu_seconds() - used, self.handler.traffic()
        return {
            "seconds": seconds,
            "cpu": cpu,
            "compute": after.compute_seconds - before.compute_seconds,
            "read": after.shared_read_bytes - before.shared_read_bytes,
            "written": after.shared_write_bytes - before.shared_write_bytes,
        }

    @property
    def files(self) -> Sequence[StateFile]:
        """State file of each folder."""
        return self._store.files

    def halves(self) -> tuple[int, int]:
        """Return the offsets, in the only device's file, of the half that holds the state and of the other half."""
        extents, positions = self._store.extents, self._store.placement.positions
        lower, upper = 0, extents.place_offset(extents.num_tasklets)
        return (lower, upper) if positions.max(initial=0) < extents.num_tasklets else (upper, lower)

    def close(self) -> None:
        """Remove the state."""
        self.handler.close(remove=True)


def _bf16_memory(numel: int) -> HostBuffer:
    """Allocate memory and fill it with the upper halves of random fp32 numbers."""
    values = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32).view(np.uint32) >> 16
    memory = HostBuffer(2 * numel)
    np.copyto(np.frombuffer(memory.memoryview(), np.uint16), np.resize(values.astype(np.uint16), numel))
    return memory
