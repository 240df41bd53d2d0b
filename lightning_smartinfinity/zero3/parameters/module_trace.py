"""Keeps ZeRO-3 from copying its trace of modules whenever a module releases its parameters."""

from __future__ import annotations

from typing import Any

from lightning_smartinfinity.zero3.setup.environment import having_local_rank
from lightning_smartinfinity.zero3.untyped import ZeroOffload

__all__ = ["ModuleTrace", "read_trace_lazily"]

# The attribute of DeepSpeed's coordinator that holds the modules in the order in which they are used.
_TRACE = "_PartitionedParameterCoordinator__submodule_order"


class ModuleTrace(tuple[Any, ...]):
    """The modules in the order of their use; a slice is an iterator, of which the first few are read at most.

    DeepSpeed slices the trace for every module and looks as far as ``stage3_max_reuse_distance`` allows. Copies would
    make the time of a step grow with the square of the number of modules.
    """

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return map(super().__getitem__, range(*key.indices(len(self))))
        return super().__getitem__(key)


def read_trace_lazily(offload: ZeroOffload) -> None:
    """Let the coordinator of parameters keep every complete trace as a :class:`ModuleTrace`.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``.
    """
    coordinator = offload.get_param_coordinator()
    reset = coordinator.reset_step

    def reset_step() -> None:
        with having_local_rank():
            reset()
        trace = getattr(coordinator, _TRACE)
        if type(trace) is tuple:
            setattr(coordinator, _TRACE, ModuleTrace(trace))

    coordinator.reset_step = reset_step
