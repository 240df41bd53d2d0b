"""Measures a drive by updating a small optimizer state on it: the reads, updates and writes of every step."""

from __future__ import annotations

import shutil
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, build_layout
from lightning_smartinfinity.pipeline.layout.tensors import Flat, native_dtype
from lightning_smartinfinity.pipeline.parameters.partitions import HostPartition
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES, TransferConfig
from lightning_smartinfinity.storage import StoreDescription, create_store

__all__ = ["Drive", "measure_drive"]

# A drive shows its rate in long steps only after some gigabytes and seconds: with a fourth of these elements and five
# updates, the results on one machine varied by 70 %.
_NUMEL = 96 * 1024 * 1024
_RUNS, _MOST_SECONDS = 20, 15.0
_MOST_OF_FREE = 8


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Rates of updates.

    Args:
        bytes_per_second: Bytes read and written, together.
        parameters_per_cpu_second: Parameters that one thread updates in a second of computing.
    """

    bytes_per_second: float
    parameters_per_cpu_second: float


def measure_drive(storage: Path, *, state_format: str = "fp32", numel: int | None = None) -> Drive:
    """Create AdamW's state of one parameter in a folder, update it with direct I/O where possible, and remove it.

    Args:
        storage: Folder on the drive, which is created if it is missing.
        state_format: Format of the state.
        numel: Elements of the parameter, which is bf16. Default: 96 Mi elements, 2.4 GB of fp32 state, but at most an
            eighth of the free space.

    Raises:
        StorageError: The folder cannot be used, or is too small.
    """
    try:
        storage.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{str(storage)!r} cannot be measured: {error}.", "Pass --storage with a folder.") from error
    numel = numel or _default_numel(storage)
    with _handler(storage, state_format=state_format, numel=numel) as (handler, plan):
        return _measured(handler, plan, numel)


def _default_numel(storage: Path) -> int:
    places, arrays, item_bytes = 2, 3, 4  # of AdamW's state in fp32
    return min(_NUMEL, shutil.disk_usage(storage).free // _MOST_OF_FREE // (places * arrays * item_bytes))


@contextmanager
def _handler(storage: Path, *, state_format: str, numel: int) -> Iterator[tuple[TransferHandler, StepPlan]]:
    # A separate job, which `smart-infinity jobs` finds if this process is killed.
    config, rule = TransferConfig(job=f"measure-{uuid.uuid4().hex[:8]}"), rule_for(_optimizer())
    layout = build_layout(
        [ParameterSlice(name="p", numel=numel, real_numel=numel, group=0, sub_group=0)],
        tasklet_bytes=HOST_TASKLET_BYTES,
        num_arrays=len(rule.arrays),
        num_devices=1,
        places_per_tasklet=config.places_per_tasklet,
        state_format=state_format,
    )
    description = StoreDescription(optimizer=rule.name, arrays=rule.arrays, parameters=({"name": "p"},))
    store = create_store([storage], config=config, extents=layout.extents, description=description)
    handler = TransferHandler(layout, store, HostDevice(num_buffers=config.num_buffers), rule=rule)
    values = [torch.full((numel,), 0.01, dtype=torch.bfloat16) for _ in range(2)]
    flats = [[Flat(each.data_ptr(), numel, native_dtype(each.dtype))] for each in values]
    try:
        handler.open()
        handler.initialize(HostPartition(flats[1]))
        yield (
            handler,
            StepPlan(
                active=np.ones(1, np.bool_),
                gradients=flats[0],
                outputs=HostPartition(flats[1]),
                groups=_optimizer().param_groups,
            ),
        )
    finally:
        handler.close(remove=True)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def _measured(handler: TransferHandler, plan: StepPlan, numel: int) -> Drive:
    seconds: list[float] = []
    computing: list[float] = []
    before, begin = handler.traffic(), time.perf_counter()
    while len(seconds) < 1 + _RUNS and (len(seconds) < 2 or time.perf_counter() - begin < _MOST_SECONDS):
        start, compute = time.perf_counter(), handler.traffic().compute_seconds
        handler.begin_step(plan)
        handler.commit()
        seconds.append(time.perf_counter() - start)
        computing.append(handler.traffic().compute_seconds - compute)
    after = handler.traffic()
    moved = after.shared_read_bytes + after.shared_write_bytes - before.shared_read_bytes - before.shared_write_bytes
    # Leave out the first step: it writes to places that were never written before.
    return Drive(
        bytes_per_second=moved / len(seconds) / statistics.median(seconds[1:]),
        parameters_per_cpu_second=numel / max(statistics.median(computing[1:]), 1e-9),
    )
