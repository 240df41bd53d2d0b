"""Trains and counts the updates that began within backward: ``python -m tests.training.guesses_worker RUNS.json``.

Also counts how often the host waits for the stream on which a device computes while it fetches a module's parameters,
and the sums of squares that the step computes, and another thread. The other thread is late.
"""

from __future__ import annotations

import threading
import time
import traceback
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from lightning_smartinfinity import native
from tests.training.worker import main

_fetching = {"modules": 0, "waits": 0}
_sums = {"in step": 0, "beside": 0}


def count_waits() -> None:
    """Count from now on, in ``_fetching``."""
    fetch, synchronize = PartitionedParameterCoordinator.fetch_sub_module, torch.cuda.Stream.synchronize
    within = False

    def fetch_sub_module(*arguments: Any, **named: Any) -> None:
        nonlocal within
        within = True
        _fetching["modules"] += 1
        fetch(*arguments, **named)
        within = False

    def synchronize_counting(stream: torch.cuda.Stream) -> None:
        _fetching["waits"] += within and stream == torch.cuda.default_stream()
        synchronize(stream)

    PartitionedParameterCoordinator.fetch_sub_module = fetch_sub_module
    torch.cuda.Stream.synchronize = synchronize_counting  # type: ignore[method-assign]


def count_sums() -> None:
    """Count from now on, in ``_sums``."""
    sum_of_squares = native.sum_of_squares

    def counted(*arguments: Any) -> float:
        beside = "squares" in threading.current_thread().name
        _sums["beside"] += beside
        _sums["in step"] += "squares" in {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        time.sleep(0.001 * beside)
        return sum_of_squares(*arguments)

    native.sum_of_squares = counted


def guesses(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the figures of a training, and end it."""
    optimizer: Any = trainer.strategy.optimizers[0]
    figures = {
        "outputs": type(optimizer.partition.outputs(by_cuda=True)).__name__,
        "adopted": optimizer.speculation.num_adopted,
        "binding": optimizer.speculation.num_binding,
        "discarded": optimizer.speculation.num_discarded,
        "fetching": dict(_fetching),
        "sums": dict(_sums),
        "pinned": {param.requires_grad: param.ds_tensor.is_pinned() for param in trainer.model.parameters()},
    }
    trainer.strategy.close()  # type: ignore[attr-defined]
    figures["threads"] = [thread.name for thread in threading.enumerate() if "squares" in thread.name]
    return figures


if __name__ == "__main__":
    count_waits()
    count_sums()
    main(guesses)
