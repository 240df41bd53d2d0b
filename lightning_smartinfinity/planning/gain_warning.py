"""Warns before a training if compressing gradients costs more than it gains."""

from __future__ import annotations

import os
import warnings

import torch

from lightning_smartinfinity.planning.cost import CompressionResources, gain_of
from lightning_smartinfinity.planning.simulator.gradients import Dense
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.zero3 import OffloadSettings

__all__ = ["warn_of_no_gain"]


def warn_of_no_gain(offload: OffloadSettings, *, num_arrays: int, num_processes: int, on_gpu: bool) -> None:
    """Warn on rank 0 if compression, which costs accuracy or at least memory, is predicted to gain nothing.

    Args:
        offload: Settings, with the cards of this process.
        num_arrays: Number of arrays of the optimizer's state.
        num_processes: Number of processes on this machine.
        on_gpu: Whether gradients come from a GPU.
    """
    if offload.compression is None or torch.distributed.get_rank() != 0:
        return
    dense = Workload(
        numel=1,
        gradients=Dense(offload.gradient_itemsize),
        num_arrays=num_arrays,
        parameter_bytes=offload.parameter_itemsize,
    )
    through_storage = offload.smartssd is not None and offload.smartssd.gradient_route == "storage"
    plan = offload.cards
    resources = CompressionResources(
        num_cards=0 if plan is None else max(1, num_processes * len(plan.cards) // plan.sharers),
        num_cores=len(os.sched_getaffinity(0)),
        num_threads=num_processes * offload.feed_back_threads,
        num_gpus=num_processes if on_gpu else 0,
        route=Route.STORAGE if through_storage else Route.HOST,
    )
    gain = gain_of(offload.compression, dense, resources)
    if not gain.gains:
        warnings.warn(f"compression={offload.compression} is predicted to bring no gain. {gain.reason}", stacklevel=2)
