"""Changes some habits of DeepSpeed's gathers.

- Prefetching does not wait for updates that nothing needs yet.
- When a module begins to use another module's parameter, after the order of gathers was recorded, the parameter is
  gathered with that module, too. Prefetching would follow the earlier order and raise a tracing error.
- The trace of modules is not copied whenever a module releases its parameters.
- A model is freed after its training. The stack of modules whose forward runs would hold the model of every engine, and
  so would a cache of the parameters that each module may release. That cache is also emptied with every new trace.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator, iter_params
from deepspeed.utils import z3_leaf_module

from lightning_smartinfinity.zero3.setup.environment import having_local_rank
from lightning_smartinfinity.zero3.untyped import ZeroCoordinator, ZeroModule, ZeroOffload, ZeroParameter

__all__ = [
    "GATHER_PARAMS",
    "PARAMS_TO_RELEASE",
    "ModuleTrace",
    "hold_top_module_weakly",
    "read_trace_lazily",
    "restoring_stack",
    "retrace_for_external_parameters",
    "skip_in_prefetch",
    "take_off_stack",
]


GATHER_PARAMS = "_PartitionedParameterCoordinator__all_gather_params"
"""The coordinator's method that gathers the parameters of a module and, ahead of use, those of later modules."""

PARAMS_TO_RELEASE = "_PartitionedParameterCoordinator__params_to_release"
"""The coordinator's method that finds, once a trace is complete, which parameters of a module nothing uses soon."""


def skip_in_prefetch(
    coordinator: ZeroCoordinator,
    skipped: Callable[[ZeroParameter], bool],
    *,
    before_use: Callable[[Iterable[ZeroParameter]], None] | None,
) -> None:
    """Make a coordinator gather some parameters only when their own module is about to run.

    Its recorded order of parameters stays unchanged: a skipped parameter is gathered when its module runs.

    Args:
        coordinator: DeepSpeed's ``PartitionedParameterCoordinator``.
        skipped: Function that returns whether a parameter must not be prefetched; the same on all ranks.
        before_use: Function called with the parameters of a module about to run, whether already gathered or not; None:
            no function.
    """
    fetch, gather = coordinator.fetch_sub_module, getattr(coordinator, GATHER_PARAMS)
    needed: set[ZeroParameter] = set()

    def fetch_noting(current_submodule: torch.nn.Module, forward: bool) -> None:
        needed.clear()
        needed.update(iter_params(current_submodule, recurse=z3_leaf_module(current_submodule)))
        if before_use is not None:
            before_use(needed)
        fetch(current_submodule, forward)

    def gather_some(params: Iterable[ZeroParameter], forward: bool) -> None:
        # The order of sets differs between ranks. Parameters are numbered in their order of creation.
        in_order = sorted(params, key=lambda param: int(param.ds_id), reverse=not forward)
        gather({param for param in in_order if param in needed or not skipped(param)}, forward)

    coordinator.fetch_sub_module = fetch_noting
    setattr(coordinator, GATHER_PARAMS, gather_some)


def retrace_for_external_parameters(offload: ZeroOffload) -> None:
    """Make ZeRO-3 record its order again when a module begins to use further parameters.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``, whose module hooks gather.
    """
    num_known: dict[int, int] = {}

    def learning(gather: Callable[[ZeroModule], None]) -> Callable[[ZeroModule], None]:
        def gathering(sub_module: ZeroModule) -> None:
            num_external = len(getattr(sub_module, "_external_params", ()))
            coordinator = offload.get_param_coordinator()
            if num_external > num_known.get(sub_module.ds_id, 0):
                num_known[sub_module.ds_id] = num_external
                if coordinator.is_complete_trace():
                    coordinator._invalidate_trace()
            gather(sub_module)

        return gathering

    for name in ("pre_sub_module_forward_function", "pre_sub_module_backward_function"):
        setattr(offload, name, learning(getattr(offload, name)))


# The attribute of DeepSpeed's coordinator that holds the modules in the order in which they are used.
_TRACE = "_PartitionedParameterCoordinator__submodule_order"


class ModuleTrace(tuple[Any, ...]):
    """The modules in the order of their use; a slice is an iterator, not a copy.

    DeepSpeed slices the trace for every module, and reads only as far as ``stage3_max_reuse_distance`` allows. With
    copies, the time of a step would grow with the square of the number of modules.
    """

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return map(super().__getitem__, range(*key.indices(len(self))))
        return super().__getitem__(key)


def read_trace_lazily(offload: ZeroOffload) -> None:
    """Make the parameter coordinator store every complete trace as a :class:`ModuleTrace`, with a cache of its own.

    DeepSpeed's cache of the parameters to release belongs to the class. It would keep every model alive that is trained
    for more than a step.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``.
    """
    coordinator = offload.get_param_coordinator()
    reset = coordinator.reset_step
    # A decorator of DeepSpeed wraps the method, and keeps the cached function only in its closure.
    cached = inspect.getclosurevars(vars(PartitionedParameterCoordinator)[PARAMS_TO_RELEASE]).nonlocals["func"]

    def reset_step() -> None:
        with having_local_rank():
            reset()
        trace = getattr(coordinator, _TRACE)
        if type(trace) is tuple:
            setattr(coordinator, _TRACE, ModuleTrace(trace))
            compute = types.MethodType(cached.__wrapped__, coordinator)
            setattr(coordinator, PARAMS_TO_RELEASE, functools.cache(compute))

    coordinator.reset_step = reset_step


class _ModuleStack(list[torch.nn.Module]):
    """The modules whose forward runs; if none does, the last item is the module of the newest engine, if it exists."""

    top: Callable[[], torch.nn.Module | None] = staticmethod(lambda: None)

    def __getitem__(self, index: Any) -> Any:
        if index == -1 and not self and (top := self.top()) is not None:
            return top
        return super().__getitem__(index)


def hold_top_module_weakly(offload: ZeroOffload) -> None:
    """Take the engine's module, which has just been put there, off DeepSpeed's stack of modules.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``.
    """
    stack = parameter_offload.FWD_MODULE_STACK
    if not isinstance(stack, _ModuleStack):
        stack = parameter_offload.FWD_MODULE_STACK = _ModuleStack(stack)
    take_off_stack([offload.module])
    stack.top = weakref.ref(offload.module)


@contextmanager
def restoring_stack() -> Iterator[None]:
    """Leave DeepSpeed's stack of modules, at the end of this context, as deep as at its beginning.

    A forward that is broken off leaves its modules there. So does each segment of torch's checkpointing that is not
    reentrant: backward ends the recomputation as soon as it has what it needs, within a module.
    """
    depth = len(parameter_offload.FWD_MODULE_STACK)
    try:
        yield
    finally:
        del parameter_offload.FWD_MODULE_STACK[depth:]


def take_off_stack(modules: Iterable[torch.nn.Module]) -> None:
    """Take modules off DeepSpeed's stack of modules, where a forward pass that was broken off leaves them."""
    removed = set(modules)
    parameter_offload.FWD_MODULE_STACK[:] = [each for each in parameter_offload.FWD_MODULE_STACK if each not in removed]
