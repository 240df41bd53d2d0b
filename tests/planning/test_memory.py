"""The memory predicted equals the memory held."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.planning import Dense, TopKPayload, Workload, host_bytes
from lightning_smartinfinity.settings import TopK
from tests.pipeline.harness import Case, Run

NUMEL = 200_000
CASE = Case(shapes=((NUMEL // 2, 0, 0, 0), (NUMEL // 2, 0, 1, 0)))
DENSE = Workload(
    numel=NUMEL, gradients=Dense(4), parameter_bytes=4, tasklet_bytes=CASE.tasklet_bytes, num_buffers=CASE.num_buffers
)


def test_on_the_host(tmp_path: Path) -> None:
    """The prediction for the host is the ring and the arena."""
    run = Run(tmp_path, CASE)
    held = {"ring": run.handler.ring_bytes, "gradient_arena": run.arena.buffer.nbytes}
    assert host_bytes(DENSE, arena_item_bytes=4) == held


@pytest.mark.parametrize("error_feedback", [True, False])
def test_compressed(tmp_path: Path, error_feedback: bool) -> None:
    """The prediction adds payloads of every tasklet, and four bytes of residual per parameter."""
    run = Run(tmp_path, CASE)
    codec = TopK(0.05, error_feedback=error_feedback)
    made = CompressedGradients(run.layout, codec, gradients=run.arena.buffer, num_threads=1)
    workload = Workload(numel=NUMEL, gradients=TopKPayload(0.05, 4), tasklet_bytes=CASE.tasklet_bytes)
    held = host_bytes(workload, arena_item_bytes=4, num_cards=1, error_feedback=error_feedback)
    assert (held["payloads"], held.get("residual", 0)) == (made.payload_bytes, made.residual_bytes)
