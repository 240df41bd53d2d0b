"""Gathers parameters temporarily, and makes writes to them the same on all ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, ZeroParamStatus

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.parameters.status import restore_classes
from lightning_smartinfinity.zero3.ranks.collectives import agree_to_gather
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = [
    "NO_GRAPH_TASK",
    "broadcast",
    "describe",
    "end_gathers",
    "engine_has_turn",
    "gathered",
    "in_forward",
    "is_in_context",
    "is_in_forward",
    "refuse_beside_engine",
    "whole_data",
]


# torch's graph task id outside of backward.
NO_GRAPH_TASK = -1
_LIBRARIES = ("torch.", "contextlib", "copy", "functools", "deepspeed.", "lightning_smartinfinity.")
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


# Not empty while an engine runs forward.
_FORWARDS: list[bool] = []


@contextmanager
def in_forward() -> Iterator[None]:
    """Mark an engine's forward: activations are 16-bit there, and parameters are read in their own dtype."""
    _FORWARDS.append(True)
    try:
        yield
    finally:
        _FORWARDS.pop()


def is_in_forward() -> bool:
    """Return whether an engine runs forward."""
    return bool(_FORWARDS)


# Held while an engine runs, and while user code has gathered parameters.
_TURN = threading.RLock()
_ENGINES: list[int] = []


@contextmanager
def engine_has_turn() -> Iterator[None]:
    """Keep other threads from gathering parameters within this context: an engine runs forward, backward or step."""
    with _TURN:
        depth = len(_ENGINES)
        try:
            _ENGINES.append(threading.get_ident())
            yield
        finally:
            del _ENGINES[depth:]  # nothing to remove if Ctrl-C hit before the append


def refuse_beside_engine() -> None:
    """Raise UnsupportedError if this thread is about to gather while another one runs an engine."""
    if _ENGINES and _ENGINES[-1] != threading.get_ident() and not _in_backward():
        raise UnsupportedError(
            f"The thread {threading.current_thread().name!r} used a partitioned parameter while another thread ran "
            "forward, backward or a step: ZeRO-3 gathers for one thread at a time.",
            "Take copies (param.detach().clone()) in the thread that trains, in a hook of the training, and give the "
            "other thread these.",
        )


@contextmanager
def _turn() -> Iterator[None]:
    if _in_backward():  # autograd's own threads work for the thread that holds the lock
        yield
        return
    # While this thread waits, another one may begin forward, backward or a step. The wait then ends with the error.
    while not _TURN.acquire(timeout=0.01):
        refuse_beside_engine()
    try:
        yield
    finally:
        _TURN.release()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != NO_GRAPH_TASK


def is_in_context(param: ZeroParameter) -> bool:
    """Return whether a parameter is within ``GatheredParameters``."""
    return DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR in param.__dict__


def whole_data(param: ZeroParameter) -> torch.Tensor:
    """Return the memory of a gathered parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        data: torch.Tensor = _DATA(param)
        return data


@contextmanager
def gathered(params: Sequence[ZeroParameter], written: Sequence[ZeroParameter] = ()) -> Iterator[None]:
    """Gather parameters within this context, and partition those again that were partitioned before. Collective.

    Args:
        params: The parameters.
        written: The parameters that the context changes. All ranks then get the values of rank 0.

    Raises:
        UnsupportedError: Another thread runs forward, backward or a step.
    """
    with _turn(), _gathered(params, written):
        yield


@contextmanager
def _gathered(params: Sequence[ZeroParameter], written: Sequence[ZeroParameter]) -> Iterator[None]:
    missing = [param for param in params if param.ds_status is not ZeroParamStatus.AVAILABLE]
    # Written parameters are broadcast even if they were already gathered.
    shared = missing + [param for param in written if all(param is not each for each in missing)]
    if shared and dist.get_world_size() > 1 and torch._C._current_graph_task_id() == NO_GRAPH_TASK:
        agree_to_gather([param.ds_id for param in shared], partial(describe, shared, sys._getframe()))
    if missing:
        missing[0].all_gather(param_list=missing)
    changed: set[int] = set()
    try:
        yield
        for param in written:
            if all(param is not each for each in missing):  # missing ones are broadcast when partitioned
                broadcast(param)
        changed = {param.ds_id for param in written}
    finally:
        for param in params:
            param.was_written = param.was_written or param.ds_id in changed
        # Partitioning updates the masters. A written parameter that is idle is partitioned now, others later.
        leaving = [
            param
            for param in params
            if any(param is each for each in missing) or (param.ds_id in changed and _is_idle(param))
        ]
        if leaving:
            leaving[0].partition(param_list=leaving)


def _is_idle(param: ZeroParameter) -> bool:
    """Return whether a gathered parameter may be partitioned: no forward, backward or GatheredParameters uses it."""
    if param.ds_active_sub_modules or is_in_forward() or torch._C._current_graph_task_id() != NO_GRAPH_TASK:
        return False
    return not is_in_context(param)


def describe(params: Sequence[ZeroParameter], frame: Any) -> tuple[list[str], str]:
    """Return the names of parameters, and the file and line of the user code that uses them."""
    owner = params[0].__dict__.get("_z3_optimizer")
    known = getattr(owner, "param_names", {})
    names = [str(known.get(param, f"a parameter of shape {tuple(param.ds_shape)}")) for param in params]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
        frame = frame.f_back
    return names, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def broadcast(param: ZeroParameter, values: torch.Tensor | None = None) -> None:
    """Give all ranks the values that a gathered parameter has on rank 0. Collective.

    Args:
        param: The parameter.
        values: Tensor to broadcast instead of the parameter's memory.
    """
    if dist.get_world_size(param.ds_process_group) > 1:
        values = whole_data(param) if values is None else values
        root = dist.get_global_rank(param.ds_process_group, 0)
        dist.broadcast(values.view(-1).view(torch.uint8), root, group=param.ds_process_group)


def end_gathers(module: torch.nn.Module) -> None:
    """Wait for the gathers in flight, and reset parameters whose gather cannot be waited for.

    DeepSpeed marks parameters as in flight before it records their wait handles, and removes a handle before it waits.
    Ctrl-C in between leaves some marked parameters without a handle. As several parameters share a gather, it leaves
    others whose wait fails.
    """
    params = [param for param in cast(Iterator[ZeroParameter], module.parameters()) if "_classes" in param.__dict__]
    restore_classes(params)  # Ctrl-C may have interrupted restore_classes itself
    awaited = getattr(module, "ds_inflight_param_registry", {})
    handles = list(awaited.values())
    awaited.clear()
    for handle in handles:
        with suppress(AssertionError):  # some of its parameters are already gathered
            handle.wait()
    for param in cast(Iterator[ZeroParameter], module.parameters()):
        if getattr(param, "ds_status", None) is ZeroParamStatus.INFLIGHT:
            param.data = param.data.new_empty(0)
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE
