"""Measures the rates of this machine that determine the time of a step."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.pace import Range, Rates
from lightning_smartinfinity.planning.survey.drive import measure_drive
from lightning_smartinfinity.planning.survey.models import ModelSource, default_dtype, with_transformer
from lightning_smartinfinity.planning.survey.passes import loss_of
from lightning_smartinfinity.planning.training import Training

__all__ = ["measure_rates", "require_device"]

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
