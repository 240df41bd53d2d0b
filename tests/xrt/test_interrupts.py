"""Ctrl-C on any line of the devices, in steps in which a card fails, never commits what is not on storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import SmartInfinityError
from lightning_smartinfinity.devices import host
from lightning_smartinfinity.devices.smartssd import device, worker
from lightning_smartinfinity.pipeline.parameters import submissions
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from tests.helpers.card_runs import cards, same_as_host, settled_host
from tests.helpers.interrupts import Interrupt
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Case, Run, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

CASE = Case(dtype=torch.bfloat16, num_devices=2, shapes=((9_000, 0, 0, 0), (6_000, 3, 1, 0), (7_000, 0, 0, 1)))
MODULES = (device, worker, host, submissions)


@pytest.mark.parametrize(
    ("incremental", "goes_on", "every"),
    long_but([(True, False, 3)], [(True, False, 3), (False, True, 1), (True, False, 1)]),
)
def test_on_every_line(
    tmp_path: Path, emulated_cards: EmulatedCards, incremental: bool, goes_on: bool, every: int
) -> None:
    """A step interrupted on any line is continued, or rolled back and redone; then every byte is as on the host.

    The form that always runs tries every third line.
    """
    with (
        running(tmp_path / "card", CASE, device=cards(emulated_cards.build.xclbin)) as run,
        running(tmp_path / "host", CASE, device=settled_host) as host_run,
    ):
        number, came = 0, True
        while came:
            emulated_cards.inject("error", card=number % 2)
            came = interrupted_step(run, number, every * number, incremental=incremental)
            emulated_cards.reset()
            if came:
                finish(run, number, goes_on=goes_on)
            number += 1
        assert every * number > 100
        for step in range(number):
            make_step(host_run, step)
        same_as_host(run, host_run)


def plan_of(run: Run, step: int) -> StepPlan:
    """Plan a step with every parameter active, as an incremental step needs it."""
    plan = run.collect(step)
    plan.active[:] = True
    return plan


def make_step(run: Run, step: int) -> None:
    run.handler.begin_step(plan_of(run, step))
    run.handler.commit()


def interrupted_step(run: Run, step: int, line: int, *, incremental: bool) -> bool:
    """Run a step with Ctrl-C on this line, and return whether there was such a line."""
    plan = plan_of(run, step)
    try:
        with Interrupt(line, MODULES).coming():
            if incremental:
                run.handler.begin_incremental(plan)
                run.handler.step.extend([4, 3])
                run.handler.step.wait([2])
                run.handler.step.extend([0])
                assert run.handler.step.complete(plan)
            else:
                run.handler.begin_step(plan)
                run.handler.step.wait([0])
            run.handler.finish()
            run.handler.commit()
    except KeyboardInterrupt:
        return True
    return False


def finish(run: Run, step: int, *, goes_on: bool) -> None:
    if run.handler.in_flight and goes_on and run.handler.step.is_complete:
        try:
            run.handler.finish()
            run.handler.commit()
        except SmartInfinityError:
            assert run.handler.in_flight
    if run.handler.in_flight:
        run.handler.roll_back()
    if run.handler.generation == step:  # that of the step before it
        make_step(run, step)
