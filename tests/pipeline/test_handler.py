"""What the handler moves, what it holds, and in which order it works. test_programs.py has the bits.

test_rules.py and test_other_rules.py compare its arithmetic with torch.optim's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipeline.harness import Case, complete_tasklets, everything, running

BF16 = torch.bfloat16


def test_a_completed_step_goes_on_with_what_is_used_first(tmp_path: Path) -> None:
    """Backward opens the last layers' tasklets first. On completion the order becomes that of first use."""
    with running(tmp_path, Case()) as run:
        plan = run.collect(1)
        uses = np.random.default_rng(0).permutation(len(run.layout.parameters))
        preferred: list[list[int]] = []
        run.device.prefer = preferred.append  # type: ignore[method-assign, assignment]
        run.handler.begin_incremental(everything(plan))
        opened = complete_tasklets(run, plan)[::-1]
        run.handler.step.extend(opened)
        assert opened and run.handler.step.complete(replace(plan, first_uses=uses))
        run.handler.commit()
        tasklets = run.layout.in_order_of_use(range(len(run.layout.tasklets)), uses)
        listed = [*opened, *(tasklet for tasklet in tasklets if tasklet not in opened)]
        assert [listed[position] for position in preferred[0]] == [t for t in tasklets if t in listed]


@pytest.mark.parametrize(
    ("optimizer", "state_format", "dtype", "read_bytes", "written_bytes"),
    [
        (torch.optim.AdamW, "fp32", torch.float32, 8, 12),
        (torch.optim.AdamW, "fp32", BF16, 12, 12),
        (torch.optim.AdamW, "bf16", BF16, 8, 8),
        (torch.optim.AdamW, "bf16", torch.float32, 4, 8),
        (torch.optim.AdamW, "int8", BF16, 6, 6),
        (torch.optim.AdamW, "int8", torch.float32, 2, 6),
        (torch.optim.AdamW, "int8_remainder", BF16, 4, 6),
        (torch.optim.Adagrad, "fp32", torch.float32, 4, 8),
        (torch.optim.SGD, "fp32", BF16, 8, 8),
        (torch.optim.RMSprop, "fp32", torch.float32, 12, 16),
    ],
)
def test_traffic(
    tmp_path: Path, optimizer: type, state_format: str, dtype: torch.dtype, read_bytes: int, written_bytes: int
) -> None:
    """A step moves the documented bytes per parameter, plus exponents and trailers. No channel is internal."""
    numel = 40_960
    case = Case(
        optimizer=optimizer,
        options=({}, {}),
        dtype=dtype,
        state_format=state_format,
        shapes=((numel, 0, 0, 0),),
        tasklet_bytes=1 << 20,
    )
    with running(tmp_path, case) as run:
        before = run.handler.traffic()
        run.step(1)
        moved = run.handler.traffic() - before
        overhead = 4096 + (4096 if state_format.startswith("int8") else 0)
        assert moved.shared_read_bytes == read_bytes * numel + overhead
        assert moved.shared_write_bytes == written_bytes * numel + overhead
        assert (moved.steps, moved.numel) == (1, numel)
        assert moved.internal_read_bytes == moved.internal_write_bytes == 0


def test_memory_is_bounded(tmp_path: Path) -> None:
    """The ring holds num_buffers extents, and staging takes at most as much again."""
    with running(tmp_path, Case(staged=True, num_buffers=4, dtype=BF16)) as run:
        assert run.device.ring_bytes == 4 * run.layout.extents.place_bytes <= 4 * 64 * 1024
        assert run.device.ring_bytes < run.handler.ring_bytes <= 2 * run.device.ring_bytes


def test_tasklets_without_gradient_stay_where_they_are(tmp_path: Path) -> None:
    """A tasklet without an active parameter keeps its place and its generation. A step without any is a generation."""
    shapes = ((8_192, 0, 0, 0), (4_096, 0, 0, 0), (8_192, 0, 0, 0))
    with running(tmp_path, Case(shapes=shapes)) as run:
        run.step(2)  # the second parameter has no gradient
        for generation in (1, 2):
            assert run.handler.generation == generation
            assert run.store.placement.positions.tolist() == [5, 6, 2, 8, 9]
            assert run.store.tasklet_generations.tolist() == [1, 1, 0, 1, 1]
            assert run.handler.steps.tolist() == [1, 0, 1]
            plan = run.collect(3)
            run.arena.reset()
            run.handler.begin_step(plan)
            run.handler.step.wait()
            run.handler.commit()


@pytest.mark.parametrize(
    "shapes", [(), ((0, 0, 0, 0),), ((0, 0, 0, 0), (5, 5, 1, 1))], ids=["none", "empty", "padding"]
)
def test_partitions_of_nothing(tmp_path: Path, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    """A rank without elements, or with padding only, can do a step, and read and replace its state."""
    with running(tmp_path, Case(shapes=shapes)) as run:
        plan = run.collect(0)
        for index in range(len(shapes)):
            run.arena.arrive(index, torch.empty(0))
        run.handler.begin_step(plan)
        run.handler.step.wait(slice(0, 1))
        run.handler.commit()
        assert run.handler.steps.tolist() == [1] * len(shapes)
        windows: list[object] = []
        run.handler.state.scan(windows.append)
        run.handler.state.replace(windows.append, steps=run.handler.steps + 3)
        assert len(windows) == 2 * (run.layout.numel > 0)
        assert run.handler.generation == 2
        assert run.handler.steps.tolist() == [4] * len(shapes)
