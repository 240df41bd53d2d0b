"""The handler's calls in and out of order, what it moves, and what it holds. test_programs.py has the bits.

test_rules.py and test_other_rules.py compare its arithmetic with torch.optim's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import ConfigError
from tests.pipeline.harness import Case, Run, assert_equal, running

BF16, FP16 = torch.bfloat16, torch.float16
NEEDING_A_STEP: dict[str, Callable[[Run], object]] = {
    "commit": lambda run: run.handler.commit(),
    "roll_back": lambda run: run.handler.roll_back(),
    "wait": lambda run: run.handler.step.wait(),
}
NOT_IN_A_STEP: dict[str, Callable[[Run], object]] = {
    "begin_step": lambda run: run.handler.begin_step(run.collect(1)),
    "scan": lambda run: run.handler.state.scan(print),
    "replace": lambda run: run.handler.state.replace(print, steps=run.handler.steps),
    "read_parameter": lambda run: run.handler.state.read_parameter(0),
    "modify": lambda run: run.handler.state.modify({}),
    "initialize": lambda run: run.handler.initialize(run.outputs()),
}


def test_calls_out_of_order(tmp_path: Path) -> None:
    """They are programming errors, after which a step goes on. finish() may be called at any time, and twice."""
    with running(tmp_path, Case()) as run:
        run.handler.finish()
        for name, call in NEEDING_A_STEP.items():
            with pytest.raises(AssertionError, match="no step has begun"):
                call(run)
            assert run.handler.generation == 0, name
        run.handler.begin_step(run.collect(1))
        for name, call in NOT_IN_A_STEP.items():
            with pytest.raises(AssertionError, match="a step is in flight"):
                call(run)
            assert run.handler.in_flight, name
        for _ in range(2):
            run.handler.finish()
        run.handler.commit()
        assert run.handler.generation == 1


def test_hyperparameters_out_of_range(tmp_path: Path) -> None:
    """A bad hyperparameter is refused before the step begins. Groups without gradients are not checked."""
    with running(tmp_path, Case()) as run:
        before, plan = run.state(), run.collect(1)
        run.optimizer.param_groups[0]["lr"] = float("nan")
        with pytest.raises(ConfigError, match=r"AdamW\(lr=nan\)"):
            run.handler.begin_step(plan)
        assert not run.handler.in_flight
        assert_equal(run.state(), before)
        run.arena.active[[i for i, shape in enumerate(run.case.shapes) if shape[2] == 0]] = False
        run.handler.begin_step(plan)
        run.handler.commit()


def test_counters_outlive_the_device(tmp_path: Path) -> None:
    """Traffic and memory can still be read after close(), for instance by a monitor."""
    run = Run(tmp_path, Case())
    run.step(1)
    traffic, ring = run.handler.traffic(), run.handler.ring_bytes
    run.close()
    assert run.handler.traffic().shared_read_bytes == traffic.shared_read_bytes
    assert run.handler.ring_bytes == ring


def test_power_durability_flushes_state_before_the_record(tmp_path: Path) -> None:
    """With durability power all files are flushed before the commit record is written."""
    with running(tmp_path, Case(durability="power", num_devices=2)) as run:
        events: list[str] = []
        commit_path = Path(run.store.manifest.folders[0]) / "default" / "rank-00000" / "commit.bin"
        before = commit_path.read_bytes()

        class Watched:
            def __init__(self, file: native.StateFile) -> None:
                self.path = file.path
                self.close = file.close
                self._sync = file.sync

            def sync(self) -> None:
                events.append("record too early" if commit_path.read_bytes() != before else "flushed")
                self._sync()

        run.store.files = tuple(Watched(file) for file in run.store.files)  # type: ignore[misc, assignment]
        run.step(1)
        assert events == ["flushed", "flushed"]
        assert commit_path.read_bytes() != before


def test_a_completed_step_goes_on_with_what_is_used_first(tmp_path: Path) -> None:
    """Backward opens the last layers' tasklets first. On completion the order becomes that of first use."""
    with running(tmp_path, Case()) as run:
        plan = run.collect(1)
        uses = np.random.default_rng(0).permutation(len(run.layout.parameters))
        preferred: list[list[int]] = []
        run.device.prefer = preferred.append  # type: ignore[method-assign, assignment]
        run.handler.begin_incremental(replace(plan, active=np.ones_like(plan.active)))
        inactive = [run.layout.tasklets_of(slice(index, index + 1)) for index in np.flatnonzero(~plan.active)]
        opened = sorted(set(range(len(run.layout.tasklets))).difference(*inactive), reverse=True)
        run.handler.step.extend(opened)
        assert opened and run.handler.step.complete(replace(plan, first_uses=uses))
        run.handler.commit()
        tasklets = run.layout.in_order_of_use(range(len(run.layout.tasklets)), uses)
        listed = [*opened, *(tasklet for tasklet in tasklets if tasklet not in opened)]
        assert [listed[position] for position in preferred[0]] == [t for t in tasklets if t in listed]


@pytest.mark.parametrize("gradient_dtype", [BF16, FP16])
def test_gradients_of_16_bits(tmp_path: Path, gradient_dtype: torch.dtype) -> None:
    """A 16-bit arena steps like an fp32 arena that holds the same rounded values."""
    with running(tmp_path / "narrow", Case(gradient_dtype=gradient_dtype)) as run:
        run.steps(range(2))
        actual = run.state()
    with running(tmp_path / "wide", Case()) as run:
        for number in range(2):
            plan = run.collect(number)
            run.arena.buffer.copy_(run.arena.buffer.to(gradient_dtype))
            run.handler.begin_step(plan)
            run.handler.commit()
        assert_equal(actual, run.state())


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
