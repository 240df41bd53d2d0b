"""Trains and counts the updates that began within backward: ``python -m tests.training.guesses_worker RUNS.json``.

Also counts how often the host waits for the stream on which a device computes while it fetches a module's parameters,
the sums of squares that the step computes, and on an emulated device the core's copies on streams of torch.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from lightning_smartinfinity import native
from tests.native.fake_cuda import FakeCuda
from tests.training.worker import main

_counts = Counter({"sums in step": 0})


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

    def counted_sum(*arguments: Any) -> float:
        _counts["sums in step"] += is_within("squares")
        return sum_of_squares(*arguments)

    PartitionedParameterCoordinator.fetch_sub_module = fetch_sub_module
    torch.cuda.Stream.synchronize = synchronize_counting  # type: ignore[method-assign]
    native.sum_of_squares = counted_sum


def copies_to_host(optimizer: Any) -> dict[str, int]:
    """Return the number of copies from the emulated device since the last call, by owner of their stream."""
    library = os.environ.get("SMART_INFINITY_EMULATED_CUDA")
    if library is None:
        return {}
    fake, of_torch = FakeCuda(Path(library)), {0, optimizer.reduce_and_partition_stream.cuda_stream}
    streams = [int(line.rpartition("=")[2]) for line in fake.log() if line.startswith("cuMemcpyDtoHAsync")]
    fake.clear()
    by_torch = len([stream for stream in streams if stream in of_torch])
    return {"torch": by_torch, "ours": len(streams) - by_torch}


def guesses(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the figures of a training, and end it."""
    optimizer: Any = trainer.strategy.optimizers[0]
    figures = {
        "outputs": type(optimizer.partition.outputs(by_cuda=True)).__name__,
        "adopted": optimizer.speculation.num_adopted,
        "binding": optimizer.speculation.num_binding,
        "discarded": optimizer.speculation.num_discarded,
        "counts": dict(_counts),
        "copies": copies_to_host(optimizer),
        "ring_bytes": optimizer.rank_state.arena.ring_bytes,
        "pinned": {param.requires_grad: param.ds_tensor.is_pinned() for param in trainer.model.parameters()},
    }
    trainer.strategy.close()  # type: ignore[attr-defined]
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return figures | {"threads": [name for name in threads if name == "smart-inf-grad"]}


if __name__ == "__main__":
    count()
    main(guesses)
