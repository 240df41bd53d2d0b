"""Trains and counts the updates that began within backward: ``python -m tests.training.guesses_worker RUNS.json``.

Also counts how often the host waits for the stream on which a device computes while it fetches a module's parameters,
and the sums of squares that the step computes, and another thread. The other thread is late.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from lightning_smartinfinity import native
from tests.training.worker import main

_counts: Counter[str] = Counter()


def is_within(function: str) -> bool:
    """Return whether this thread is within a call of a function of this name."""
    return function in {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}


def count() -> None:
    """Count from now on, in ``_counts``."""
    fetch, synchronize = PartitionedParameterCoordinator.fetch_sub_module, torch.cuda.Stream.synchronize
    sum_of_squares = native.sum_of_squares

    def fetch_sub_module(*arguments: Any, **named: Any) -> None:
        _counts["modules"] += 1
        fetch(*arguments, **named)

    def synchronize_counting(stream: torch.cuda.Stream) -> None:
        _counts["waits"] += stream == torch.cuda.default_stream() and is_within("fetch_sub_module")
        synchronize(stream)

    def late_sum(*arguments: Any) -> float:
        is_beside = "squares" in threading.current_thread().name
        _counts["sums beside"] += is_beside
        _counts["sums in step"] += is_within("squares")
        time.sleep(0.001 * is_beside)
        return sum_of_squares(*arguments)

    PartitionedParameterCoordinator.fetch_sub_module = fetch_sub_module
    torch.cuda.Stream.synchronize = synchronize_counting  # type: ignore[method-assign]
    native.sum_of_squares = late_sum


def guesses(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the figures of a training, and end it."""
    optimizer: Any = trainer.strategy.optimizers[0]
    figures = {
        "outputs": type(optimizer.partition.outputs(by_cuda=True)).__name__,
        "adopted": optimizer.speculation.num_adopted,
        "binding": optimizer.speculation.num_binding,
        "discarded": optimizer.speculation.num_discarded,
        "counts": dict(_counts),
        "pinned": {param.requires_grad: param.ds_tensor.is_pinned() for param in trainer.model.parameters()},
    }
    trainer.strategy.close()  # type: ignore[attr-defined]
    return figures | {"threads": [thread.name for thread in threading.enumerate() if "squares" in thread.name]}


if __name__ == "__main__":
    count()
    main(guesses)
