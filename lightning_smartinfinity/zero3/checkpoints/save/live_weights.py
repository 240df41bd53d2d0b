"""Collects the weights of a partitioned module on the first rank, window by window."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from typing_extensions import override

from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import WINDOW_NUMEL, Put
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import (
    Contents,
    TensorSpec,
    WeightSource,
    persistent_buffers,
)
from lightning_smartinfinity.zero3.optimizer.release import trainings_of
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.param_swapper import stored_parameter
from lightning_smartinfinity.zero3.ranks.collectives import raise_together, sum_over_ranks
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["LiveWeights"]

Collect = Callable[[torch.Tensor], list[torch.Tensor]]
"""Function that sends a rank's values to the first rank; returns all ranks' values there, else an empty list."""


class LiveWeights(WeightSource):
    """The weights of a module in this process group. All ranks make the same calls.

    Args:
        module: The module, partitioned or not, during a training, after it, or without any.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._params: dict[str, ZeroParameter] = dict(module.named_parameters())

    @cached_property
    @override
    def contents(self) -> Contents:
        first_names = {param: name for name, param in self._params.items()}
        names = self._module.named_parameters(remove_duplicate=False)
        return Contents(
            parameters={name: _spec(param) for name, param in self._params.items()},
            aliases={name: first_names[param] for name, param in names if first_names[param] != name},
            buffers={name: value.detach().cpu() for name, value in persistent_buffers(self._module)},
            others=[name for name, child in self._module.named_modules() if _has_extra_state(child)],
        )

    @override
    def read(self, names: Collection[str], put: Put, *, masters: bool) -> None:
        """Pass the elements to ``put`` on the first rank.

        A step in flight is completed first. Parameters without a training have no masters: their own values are passed
        on.

        Raises:
            StorageError: A step or another change of the state has failed, and could not be rolled back.
        """
        unread = set(names)
        for training in trainings_of(self._module):
            if training.rank_state.is_open:
                training.update.drained_handler()
            if masters:
                unread -= self._read_masters(training, unread, put)
        with _in_step() as collect:
            for name in sorted(unread):
                _read_parameter(name, self._params[name], collect, put)

    def _read_masters(self, training: StorageOptimizer, names: Collection[str], put: Put) -> set[str]:
        """Pass a training's masters to ``put``, and return the names of their parameters."""
        by_id = {id(param): name for name, param in self._params.items() if name in names}
        slices = [
            (by_id[id(param)], param, own)
            for own, param in zip(training.partition.layout.parameters, training.partition.params(), strict=True)
            if id(param) in by_id
        ]
        handler = training.update.drained_handler()
        with _in_step() as collect:
            handler.state.scan(partial(_read_window, slices, collect, put))
        return {name for name, *_ in slices}


def _read_window(
    slices: Sequence[tuple[str, ZeroParameter, ParameterSlice]], collect: Collect, put: Put, window: Window
) -> None:
    collected = collect(torch.from_numpy(window.arrays[0]))
    for name, param, own in slices:
        begin, end = max(window.begin, own.offset), min(window.end, own.offset + own.numel)
        if begin < end:
            parts = [values[begin - window.begin : end - window.begin] for values in collected]
            _put_parts(name, param, begin - own.offset, parts, put)


def _read_parameter(name: str, param: ZeroParameter, collect: Collect, put: Put) -> None:
    if not hasattr(param, "ds_id"):
        if dist.get_rank() == 0:
            for begin in range(0, param.numel(), WINDOW_NUMEL):
                put(name, begin, param.detach().flatten()[begin : begin + WINDOW_NUMEL].cpu())
        return
    step = max(1, WINDOW_NUMEL // dist.get_world_size())
    numel = param.partition_numel()
    for begin in range(0, numel, step):
        _put_parts(name, param, begin, collect(_own_values(param, begin, min(begin + step, numel))), put)


def _own_values(param: ZeroParameter, begin: int, end: int) -> torch.Tensor:
    """Return elements of this rank's partition, wherever it is stored, in host memory."""
    stored = stored_parameter(param)
    if stored is None:
        values: torch.Tensor = param.ds_tensor.detach().flatten()[begin:end].cpu()
        return values
    values = torch.empty(end - begin, dtype=param.dtype)
    parts = param.nvme_swapper.parts
    parts.get(stored, begin * param.dtype.itemsize, values.view(torch.uint8))
    parts.synchronize()
    return values


def _put_parts(name: str, param: ZeroParameter, begin: int, parts: list[torch.Tensor], put: Put) -> None:
    """Pass all ranks' values from element ``begin`` of their partitions on to ``put``, without padding."""
    for rank, values in enumerate(parts):
        first = rank * param.partition_numel() + begin
        real = values[: max(0, param.ds_numel - first)]
        if len(real):
            put(name, first, real)


@contextmanager
def _in_step() -> Iterator[Collect]:
    """Yield a function that all ranks must call equally often; if a rank fails, all raise at its next call."""
    error = None
    try:
        yield _collect
        _require_success()
    except _OtherRankFailed:
        pass
    except SmartInfinityError as caught:
        error = caught
        sum_over_ranks(1.0, None)  # takes part in the other ranks' next _require_success
    raise_together(error, None)


def _collect(values: torch.Tensor) -> list[torch.Tensor]:
    _require_success()
    size = dist.get_world_size()
    if size == 1:
        return [values]
    sent = values.view(torch.uint8).to(get_accelerator().current_device_name())
    received = [torch.empty_like(sent) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(sent, received, dst=0)
    return [part.cpu().view(values.dtype) for part in received or ()]


def _require_success() -> None:
    if sum_over_ranks(0.0, None) > 0:
        raise _OtherRankFailed


class _OtherRankFailed(Exception):
    """Another rank failed."""


def _spec(param: ZeroParameter) -> TensorSpec:
    return TensorSpec(torch.Size(getattr(param, "ds_shape", param.shape)), param.dtype, trained=param.requires_grad)


def _has_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state
