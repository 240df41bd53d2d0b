"""The handler against torch.optim, and against itself under other settings.

Tolerance against torch: ATen contracts multiplications and additions and divides where the native core multiplies by an
inverse, so results differ by a few units in the last place per step. Every comparison below allows a relative 1e-6 and
an absolute 1e-7 (of parameters of about 1), after eight steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pipeline.harness import Case, Run, assert_equal, running

NUM_STEPS = 8
ADAM_L2 = Case(
    optimizer=torch.optim.Adam,
    options=({"lr": 1e-2, "weight_decay": 0.05}, {"lr": 3e-3, "betas": (0.8, 0.99), "maximize": True}),
)
ADAM_DECOUPLED = Case(
    optimizer=torch.optim.Adam,
    options=({"lr": 1e-2, "weight_decay": 0.05, "decoupled_weight_decay": True}, {"lr": 0.0, "betas": (0.3, 0.0)}),
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def train_beside_torch(run: Run, num_steps: int) -> None:
    for number in range(num_steps):
        run.step(number)
        run.optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [Case(), ADAM_L2, ADAM_DECOUPLED], ids=["adamw", "adam-l2", "adam-decoupled"])
def test_follows_torch(tmp_path: Path, case: Case, dtype: torch.dtype) -> None:
    """Masters, moments and step counts follow torch through groups, schedules, scaling and skipped parameters."""
    with running(tmp_path, case.but(dtype=dtype)) as run:
        train_beside_torch(run, NUM_STEPS)
        for index, parameter in enumerate(run.parameters):
            state = run.optimizer.state[parameter]
            arrays = run.handler.state.read_parameter(index)
            assert run.handler.steps[index] == state["step"]
            for name, expected in (("master", parameter.detach()), *((n, state[n]) for n in ("exp_avg", "exp_avg_sq"))):
                torch.testing.assert_close(torch.from_numpy(arrays[name]), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partition_is_the_rounded_master(tmp_path: Path, dtype: torch.dtype) -> None:
    """Parameters are the master rounded to their dtype, and padding stays zero."""
    with running(tmp_path, Case(dtype=dtype)) as run:
        run.steps(range(3))
        state = run.state()
        torch.testing.assert_close(state["partition"], state["master"].to(dtype), rtol=0, atol=0)
        for parameter in run.layout.parameters:
            begin, end = parameter.offset + parameter.real_numel, parameter.offset + parameter.numel
            assert not state["partition"][begin:end].any()


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float16])
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


def test_traffic_of_fp32_and_16_bit_steps(tmp_path: Path) -> None:
    """A 32-true step reads 8 and writes 12 bytes per parameter. A 16-bit step reads and writes 12."""
    shapes = ((20_480, 0, 0, 0),)
    blocks = 5 * 4096
    for dtype, read_bytes in ((torch.float32, 8), (torch.bfloat16, 12)):
        with running(tmp_path / str(dtype), Case(dtype=dtype, shapes=shapes)) as run:
            before = run.handler.traffic()
            run.step(1)
            after = run.handler.traffic()
            assert after.shared_read_bytes - before.shared_read_bytes == read_bytes * 20_480 + blocks
            assert after.shared_write_bytes - before.shared_write_bytes == 12 * 20_480 + blocks
            assert (after.steps, after.numel) == (1, 20_480)
            assert after.internal_read_bytes == after.internal_write_bytes == 0


def test_memory_is_bounded(tmp_path: Path) -> None:
    """The ring holds num_buffers extents, and staging takes at most as much again."""
    with running(tmp_path, Case(staged=True, num_buffers=4, dtype=torch.bfloat16)) as run:
        assert run.device.ring_bytes == 4 * run.layout.extents.place_bytes <= 4 * 64 * 1024
        assert run.device.ring_bytes < run.handler.ring_bytes <= 2 * run.device.ring_bytes


def test_tasklets_without_gradient_stay_where_they_are(tmp_path: Path) -> None:
    """A tasklet without an active parameter keeps its place and its generation."""
    shapes = ((8_192, 0, 0, 0), (4_096, 0, 0, 0), (8_192, 0, 0, 0))
    with running(tmp_path, Case(shapes=shapes)) as run:
        run.step(2)  # the second parameter has no gradient
        assert run.store.placement.positions.tolist() == [5, 6, 2, 8, 9]
        assert run.store.tasklet_generations.tolist() == [1, 1, 0, 1, 1]
        assert run.handler.steps.tolist() == [1, 0, 1]


def test_step_without_any_gradient_commits_nothing_but_its_number(tmp_path: Path) -> None:
    """A step without gradients commits a new generation, so that all ranks stay at the same one."""
    with running(tmp_path, Case()) as run:
        before = run.state()
        plan = run.collect(0)
        run.arena.reset()
        run.handler.begin_step(plan)
        run.handler.step.wait()
        run.handler.commit()
        assert run.handler.generation == 1
        assert_equal(run.state(), before)


@pytest.mark.parametrize(
    "shapes", [(), ((0, 0, 0, 0),), ((0, 0, 0, 0), (5, 5, 1, 1))], ids=["none", "empty", "padding"]
)
def test_partitions_of_nothing(tmp_path: Path, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    """A rank without elements, or with padding only, can do a step."""
    with running(tmp_path, Case(shapes=shapes)) as run:
        plan = run.collect(0)
        for index in range(len(shapes)):
            run.arena.arrive(index, torch.empty(0))
        run.handler.begin_step(plan)
        run.handler.step.wait(slice(0, 1))
        run.handler.commit()
        assert run.handler.steps.tolist() == [1] * len(shapes)
        assert run.handler.generation == 1
