"""The function that closes the state of a training that was dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.pipeline.parameters.partitions import TensorPartition
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from tests.helpers.waiting import LIMIT, await_that
from tests.pipeline.harness import Case, Run


@pytest.mark.parametrize("keep", [False, True])
def test_called_by_the_thread_that_moves_parameters(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run there: the thread does not wait for itself, and the state is closed."""
    run = Run(tmp_path, Case(staged=True, num_buffers=2, keep=keep))
    rank_state = RankState(keep=keep)
    rank_state.hold_handler(run.handler)
    closers: list[Callable[[], None]] = [rank_state.closer()]
    put, begun = TensorPartition.put, threading.Event()

    def collected(partition: TensorPartition, sub_group: int, offset: int, values: torch.Tensor) -> None:
        begun.wait(LIMIT)
        if closers:
            closers.pop()()
        put(partition, sub_group, offset, values)

    monkeypatch.setattr(TensorPartition, "put", collected)
    run.handler.begin_step(run.collect(1))
    begun.set()
    await_that(lambda: not run.handler.in_flight, seconds=30)
    await_that(lambda: not any(t.name.startswith("smart-infinity") for t in threading.enumerate()), seconds=30)
    assert run.handler.generation == int(keep) and bool(list(tmp_path.rglob("*.bin"))) == keep
    run.arena.close()
