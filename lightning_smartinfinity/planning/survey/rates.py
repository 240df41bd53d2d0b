"""Measures the rates of this machine that determine the time of a step.

A drive is measured by updating a small optimizer state on it: the reads, updates and writes of every step.
"""

from __future__ import annotations

import copy
import gc
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import ConfigError, StorageError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, build_layout
from lightning_smartinfinity.pipeline.layout.ring import DRIVE_BUFFERS
from lightning_smartinfinity.pipeline.layout.tensors import Flat, native_dtype
from lightning_smartinfinity.pipeline.parameters.partitions import HostPartition
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.pace import Range, Rates
from lightning_smartinfinity.planning.survey.models import ModelSource, default_dtype, with_transformer
from lightning_smartinfinity.planning.survey.passes import loss_of
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES, TransferConfig
from lightning_smartinfinity.storage import StoreDescription, create_store

__all__ = [
    "Drive",
    "measure_drive",
    "measure_rates",
    "require_device",
]


# A drive shows its rate in long steps only after some gigabytes and seconds: with a fourth of these elements and five
# updates, the results on one machine varied by 70 %.
_NUMEL = 96 * 1024 * 1024
_STEPS, _MOST_SECONDS = 20, 15.0
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
    handler = TransferHandler(layout, store, HostDevice(num_buffers=DRIVE_BUFFERS), rule=rule)
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
    while len(seconds) < 1 + _STEPS and (len(seconds) < 2 or time.perf_counter() - begin < _MOST_SECONDS):
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


_FEW_LAYERS, _LEAST_LAYERS = 1, 3
_TIMED_BYTES = 10**9  # bytes of parameters, unless three layers have more
_RUNS = 3
_SECONDS_FOR_PASSES = 15.0  # limit for repeating each of the two models
_COPIED_BYTES = 256 << 20


def require_device(device: str) -> str:
    """Return the device, ``"cpu"`` or ``"cuda"``, if this machine has it.

    Raises:
        ConfigError: There is no GPU to measure.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("plan --measure --gpu-memory: this machine has no GPU to measure.", "Leave out --measure.")
    return device


def measure_rates(
    source: ModelSource, model: ModelFigures, training: Training, rates: Rates, *, storage: Path, device: str
) -> Rates:
    """Measure on this machine, in about a minute, and return the rates with measured figures.

    A transformers model runs forward and backward in the parameters' dtype. If its parameters exceed 1 GB, two smaller
    models with layers of the same shapes run instead: one with a single layer, and one of about 1 GB, but at least
    three layers. The time of the whole model is extrapolated from their difference. If a module contains a transformers
    model, that model is measured.

    Args:
        source: The model.
        model: Its sizes.
        training: The training.
        rates: Rates to replace.
        storage: Folder on the drive to measure; files created there are removed at the end.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        StorageError: The drive cannot be measured.
    """
    if model.passes is not None:
        forward, backward = _flops(with_transformer(source), model, training, device=device)
        rates = replace(rates, flops=Range.exactly(forward), backward_flops=Range.exactly(backward))
    drive = measure_drive(storage, state_format=training.state_format)
    measured = replace(
        rates,
        copy=Range.exactly(_copy_rate()),
        drive_read=Range.exactly(drive.bytes_per_second),
        drive_write=Range.exactly(drive.bytes_per_second),
        update=Range.exactly(drive.parameters_per_cpu_second),
    )
    return replace(measured, to_gpu=Range.exactly(_to_gpu_rate())) if device == "cuda" else measured


def _flops(source: ModelSource, model: ModelFigures, training: Training, *, device: str) -> tuple[float, float]:
    """Return the operations per second of forward and backward."""
    dtype = torch.float32 if training.item_bytes == 4 else torch.bfloat16
    seconds = _seconds_of_model(source, model, training, dtype=dtype, device=device)
    passes = model.passes_of(training.batch)
    assert passes is not None
    return passes.forward_flops / seconds[0], passes.backward_flops / seconds[1]


def _seconds_of_model(
    source: ModelSource, model: ModelFigures, training: Training, *, dtype: torch.dtype, device: str
) -> tuple[float, float]:
    """Return the seconds of forward and backward of the whole model, extrapolated from fewer layers if it is large."""
    num_layers = max(_LEAST_LAYERS, model.num_layers * _TIMED_BYTES // (dtype.itemsize * model.numel))
    if model.num_layers <= num_layers:
        whole = _seconds_of_passes(source, model.num_layers, training, dtype=dtype, device=device)
        return whole[0], whole[1]
    few = _seconds_of_passes(source, _FEW_LAYERS, training, dtype=dtype, device=device)
    more = _seconds_of_passes(source, num_layers, training, dtype=dtype, device=device)
    further = (model.num_layers - _FEW_LAYERS) / (num_layers - _FEW_LAYERS)
    # Because of noise, the larger model may seem faster: assume at least a tenth of its time for the further layers.
    forward, backward = (a + further * max(b - a, 0.1 * b) for a, b in zip(few, more, strict=True))
    return forward, backward


def _seconds_of_passes(
    source: ModelSource, num_layers: int, training: Training, *, dtype: torch.dtype, device: str
) -> list[float]:
    model = _truncated(source, num_layers, dtype=dtype, device=device)
    timed: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(timed) < 1 + _RUNS and (len(timed) < 2 or time.perf_counter() - begin < _SECONDS_FOR_PASSES):
        timed.append(_time_passes(model, training, device=device))
    del model
    # A model in a reference cycle would stay in memory while the next one is measured.
    gc.collect()
    return [statistics.median(part) for part in zip(*timed[1:], strict=True)]  # the first run warms up


def _truncated(source: ModelSource, num_layers: int, *, dtype: torch.dtype, device: str) -> nn.Module:
    """Return a transformers model with fewer layers and arbitrary weights."""
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = num_layers
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:num_layers]
    assert source.build_with is not None
    with default_dtype(dtype):
        return source.build_with(config).to(device).train()


def _time_passes(model: Any, training: Training, *, device: str) -> tuple[float, float]:
    begin = time.perf_counter()
    loss = loss_of(model, batch=training.batch, seq=training.seq, device=device)
    middle = _now(device)
    loss.backward()  # type: ignore[no-untyped-call]
    end = _now(device)
    model.zero_grad(set_to_none=True)
    return middle - begin, end - middle


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _copy_rate() -> float:
    values = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(values)
    return 2 * _COPIED_BYTES / _median_seconds(lambda: target.copy_(values), "cpu")


def _to_gpu_rate() -> float:
    values = torch.ones(_COPIED_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.zeros_like(values, device="cuda")
    return _COPIED_BYTES / _median_seconds(lambda: target.copy_(values), "cuda")


def _median_seconds(work: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(1 + _RUNS):
        begin = _now(device)
        work()
        seconds.append(_now(device) - begin)
    return statistics.median(seconds[1:])
