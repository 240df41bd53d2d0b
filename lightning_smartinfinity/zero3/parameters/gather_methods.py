"""Replaces ``param.all_gather`` and ``param.partition``: gathers wait for updates, and writes are kept.

Warns if a write was rounded to 16 bit, and raises if ranks may have written different values.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.parameters.gathering import (
    NO_GRAPH_TASK,
    broadcast,
    describe,
    is_in_context,
    is_in_forward,
    refuse_beside_engine,
)
from lightning_smartinfinity.zero3.parameters.status import forget_classes, restore_classes, training_of, version
from lightning_smartinfinity.zero3.parameters.unrounded import is_rounded, settle, waiting
from lightning_smartinfinity.zero3.ranks.collectives import agree_to_gather
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["Gather", "GatherNow", "PartitionKeepingWrites", "bring_in_writes"]


# Bound here for speed: every gather and partition uses them.
_AVAILABLE, _INFLIGHT = ZeroParamStatus.AVAILABLE, ZeroParamStatus.INFLIGHT
_without_functions = torch._C.DisableTorchFunctionSubclass


class Gather:
    """DeepSpeed's ``param.all_gather`` or ``all_gather_coalesced``, after waiting for updates of its parameters."""

    def __init__(self, param: ZeroParameter, original: Callable[..., object]) -> None:
        self._param, self.original = param, original

    def __call__(self, param_list: Iterable[ZeroParameter] | None = None, *args: Any, **kwargs: Any) -> object:
        refuse_beside_engine()
        # The first argument lists the parameters; without it, all_gather gathers its own parameter.
        return self._gather([self._param] if param_list is None else list(param_list), *args, **kwargs)

    def _gather(self, params: list[ZeroParameter], *args: Any, **kwargs: Any) -> object:
        for wait in dict.fromkeys([param.__dict__.get("_before_gather") for param in params]):
            if wait is not None:
                wait(params)
        with _without_functions():
            try:
                forget_classes(params)  # inside try: an interrupt may hit within it
                return self.original(params, *args, **kwargs)
            finally:
                restore_classes(params)


class GatherNow(Gather):
    """DeepSpeed's ``param.all_gather``, for parameters whose gather may already be in flight."""

    def __call__(self, param_list: Iterable[ZeroParameter] | None = None, *args: Any, **kwargs: Any) -> object:
        refuse_beside_engine()
        params = [self._param] if param_list is None else list(param_list)
        for param in params:
            if param.ds_status is _INFLIGHT:
                _await_gather(param)
        return self._gather(params, *args, **kwargs)


def _await_gather(param: ZeroParameter) -> None:
    """Complete a gather that DeepSpeed has prefetched for a forward that was not run."""
    registry = param.__dict__.get("_in_flight_registry")
    if registry is not None and param in registry:
        registry.pop(param).wait()


class PartitionKeepingWrites:
    """DeepSpeed's ``param.partition``, which also keeps user code's writes to gathered parameters."""

    def __init__(self, param: ZeroParameter, original: Callable[..., None]) -> None:
        self._param, self.original = param, original

    def __call__(
        self,
        param_list: list[ZeroParameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        params = [self._param] if param_list is None else list(param_list)
        written: list[ZeroParameter] = []
        with _without_functions():
            for param in params:
                attributes = param.__dict__
                if attributes["ds_active_sub_modules"] and is_in_context(param):
                    _forget_modules(param)
                if has_been_updated or (
                    attributes["ds_status"] is _AVAILABLE and _has_changed(param) and _is_written_alike(param)
                ):
                    written.append(param)
            unchanged = params
            if written:
                _discard_updates_of(written)
                unchanged = [param for param in params if all(param is not each for each in written)]
            try:
                forget_classes(params)
                if unchanged:
                    self.original(unchanged, hierarchy, False, free_data)
                if written:
                    self.original(written, hierarchy, True, free_data)
            finally:
                restore_classes(params)
        if written:
            _note(written)


def _discard_updates_of(written: Sequence[ZeroParameter]) -> None:
    """Discard an update that has begun within backward: rolling it back later would undo the writes."""
    for training in dict.fromkeys(map(training_of, written)):
        if training is not None:
            training.discard_update_of(written)


def _forget_modules(param: ZeroParameter) -> None:
    """Clear modules that a partial backward left active: ``torch.autograd.grad`` may end before reaching them."""
    if torch._C._current_graph_task_id() == NO_GRAPH_TASK and not is_in_forward():
        param.ds_active_sub_modules.clear()


def bring_in_writes(params: Iterable[ZeroParameter]) -> bool:
    """Partition gathered parameters that were written, which updates their masters. Collective.

    Args:
        params: The parameters, in the same order on all ranks.

    Returns:
        Whether all of them were partitioned; False if a module still uses one.
    """
    with _without_functions():
        written = [param for param in params if param.ds_status is _AVAILABLE and _has_changed(param)]
    idle = [param for param in written if not param.ds_active_sub_modules]
    if idle:
        idle[0].partition(param_list=idle)
    return len(idle) == len(written)


def _has_changed(param: ZeroParameter) -> bool:
    attributes = param.__dict__
    return bool(attributes["was_written"] or attributes["_version_when_gathered"] != version(param))


def _is_written_alike(param: ZeroParameter) -> bool:
    """Return True for a changed gathered parameter, after making all ranks agree on its values.

    Returns False for a parameter without a partition.
    """
    if param.ds_tensor is None:
        return False
    attributes = param.__dict__
    attributes["was_written"] = False
    attributes["_version_when_gathered"] = version(param)
    if is_rounded(param.dtype) and waiting(param) is None and not is_in_context(param):
        warnings.warn(
            f"A parameter of shape {tuple(param.ds_shape)} was changed in place in {param.dtype} within forward or "
            "backward: the change was rounded. Write to param.data instead, which keeps the precision of fp32.",
            stacklevel=2,
        )
    if dist.get_world_size(param.ds_process_group) == 1:
        return True
    if is_in_context(param):
        raise UnsupportedError(
            f"A parameter of shape {tuple(param.ds_shape)} was changed within GatheredParameters without "
            "modifier_rank: ranks may have different values of it.",
            "Pass modifier_rank=0, and write on that rank or on all.",
        )
    agree_to_gather([param.ds_id], partial(describe, [param], sys._getframe()))
    broadcast(param)
    return True


def _note(params: Sequence[ZeroParameter]) -> None:
    try:
        for note in dict.fromkeys(param.__dict__.get("_note_writes") for param in params):
            if note is not None:
                note([param for param in params if param.__dict__.get("_note_writes") == note])
    finally:
        for param in params:
            settle(param)
