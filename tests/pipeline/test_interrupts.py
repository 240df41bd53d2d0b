"""Ctrl-C at any line of a step with compressed gradients: the step is continued or repeated without double counting."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import StorageError, TopK
from lightning_smartinfinity.pipeline import handler, step, step_batches
from lightning_smartinfinity.pipeline.gradients import compressed_gradients
from lightning_smartinfinity.pipeline.parameters import partitions, staged_submission, staging_buffer, submissions
from tests.helpers.interrupts import Interrupt
from tests.helpers.long_cases import long_but
from tests.pipeline.harness import Case, Run, assert_equal, complete_tasklets, everything, running

MODULES = (
    compressed_gradients,
    handler,
    partitions,
    staged_submission,
    staging_buffer,
    step,
    step_batches,
    submissions,
)
CASE = Case(
    num_buffers=2,
    shapes=((9_000, 0, 0, 0), (6_000, 3, 1, 0), (7_000, 0, 0, 1)),
    compression=TopK(0.05),
)


@pytest.mark.parametrize(
    ("staged", "goes_on", "every"),
    long_but([(True, True, 3)], [(True, True, 3), (False, False, 1), (True, True, 1)]),
)
def test_on_every_line(tmp_path: Path, staged: bool, goes_on: bool, every: int) -> None:
    """After an interrupt on any line, parameters, state and residual are those of an undisturbed step.

    The form that always runs tries every third line.
    """
    case = CASE.but(staged=staged)
    with running(tmp_path / "interrupted", case) as run, running(tmp_path / "straight", case) as straight:
        number, came = 0, True
        while came:
            came = interrupted_step(run, number, every * number)
            if came:
                finish(run, number, goes_on=goes_on)
            straight.step(number)
            assert_equal(in_memory(run), in_memory(straight))
            number += 1
        assert every * number > 100
        assert_equal(run.state(), straight.state())


def test_opening_tasklets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If extend() is interrupted, the device's tasklets are unknown, so the step is rolled back and repeated."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with running(tmp_path / "interrupted", CASE) as run, running(tmp_path / "straight", CASE) as straight:
        plan = run.collect(1)
        run.handler.begin_incremental(everything(plan))
        with monkeypatch.context() as patch:
            patch.setattr(run.device, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run.handler.step.extend(complete_tasklets(run, plan)[:1])
        assert not run.handler.step.complete(plan)
        run.handler.roll_back()
        run.step(1)
        straight.step(1)
        assert_equal(in_memory(run), in_memory(straight))
        assert_equal(run.state(), straight.state())


def interrupted_step(run: Run, step: int, line: int) -> bool:
    """Interrupt the step at this line and return whether it has such a line."""
    plan = run.collect(step)
    try:
        with Interrupt(line, MODULES).coming():
            run.handler.begin_step(plan)
            run.handler.step.wait([0])
            run.handler.commit()
    except KeyboardInterrupt:
        return True
    return False


def finish(run: Run, step: int, *, goes_on: bool) -> None:
    if run.handler.in_flight and goes_on:
        # The commit fails if it is unknown whether the device received all tasklets.
        with suppress(StorageError):
            run.handler.commit()
    if run.handler.in_flight:
        run.handler.roll_back()
    if run.handler.generation == step:  # still the generation before the step
        run.step(step)


def in_memory(run: Run) -> dict[str, torch.Tensor]:
    assert run.compressed is not None and run.compressed.residual is not None
    return {"partition": torch.cat(run.partition), "residual": run.compressed.residual}
