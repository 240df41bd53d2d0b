"""Keeps DeepSpeed's prefetching from waiting for updates that nothing needs yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

from lightning_smartinfinity.zero3.untyped import ZeroCoordinator, ZeroParameter

__all__ = ["GATHER_PARAMS", "skip_in_prefetch"]

GATHER_PARAMS = "_PartitionedParameterCoordinator__all_gather_params"
"""The coordinator's method that gathers the parameters of a module and, ahead of use, those of later modules."""


def skip_in_prefetch(
    coordinator: ZeroCoordinator,
    skipped: Callable[[ZeroParameter], bool],
    *,
    before_use: Callable[[Iterable[ZeroParameter]], None],
) -> None:
    """Make a coordinator gather some parameters only when their own module is about to run.

    Its record of what comes next stays unchanged: a parameter that was not gathered ahead is gathered then.

    Args:
        coordinator: DeepSpeed's ``PartitionedParameterCoordinator``.
        skipped: Returns whether a parameter must not be gathered ahead; the same on all ranks.
        before_use: Called with the parameters of a module that is about to run, whether gathered already or not.
    """
    fetch, gather = coordinator.fetch_sub_module, getattr(coordinator, GATHER_PARAMS)
    needed: set[ZeroParameter] = set()

    def fetch_noting(current_submodule: torch.nn.Module, forward: bool) -> None:
        needed.clear()
        needed.update(iter_params(current_submodule, recurse=z3_leaf_module(current_submodule)))
        before_use(needed)
        fetch(current_submodule, forward)

    def gather_some(params: Iterable[ZeroParameter], forward: bool) -> None:
        # Sets have another order on each rank. Parameters are numbered in the order in which they were made.
        in_order = sorted(params, key=lambda param: int(param.ds_id), reverse=not forward)
        gather({param for param in in_order if param in needed or not skipped(param)}, forward)

    coordinator.fetch_sub_module = fetch_noting
    setattr(coordinator, GATHER_PARAMS, gather_some)
