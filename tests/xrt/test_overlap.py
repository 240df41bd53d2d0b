"""Tests by the order of events what overlaps: a run that hangs keeps the card's kernel until it is released."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lightning_smartinfinity.devices.base import FolderTraffic
from tests.helpers.card_runs import beside_host, pipelines
from tests.helpers.native_testing import Throttle
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that
from tests.pipeline.harness import Case, Run
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

CASE = Case(dtype=torch.bfloat16, shapes=((40_000, 0, 0, 0),), num_buffers=4)


class Begun(NamedTuple):
    """A step whose first run is held, the parameters before it, and what has moved since, by folder."""

    run: Run
    parameters: torch.Tensor
    folders: Callable[[], Sequence[FolderTraffic]]


Begin = Callable[..., Begun]


@pytest.fixture(autouse=True)
def nobody_waits_for_what_is_held(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Assert that no step waited until the card's timeout, after which the host would have taken over."""
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if "failed: " in record.getMessage()]


@pytest.fixture
def begun(tmp_path: Path, emulated_cards: EmulatedCards) -> Iterator[Begin]:
    """A function that begins a step while a run of a card is held; at the end the step is compared with the host's."""
    with ExitStack() as stack:

        def begin(case: Case = CASE, prepare: Callable[[Run], object] = bool, **where: int) -> Begun:
            run, host = stack.enter_context(beside_host(tmp_path, case, emulated_cards.build.xclbin))
            prepare(run)
            before = run.handler.traffic()

            def finish() -> None:
                emulated_cards.release()
                run.handler.commit()
                host.step(1)

            stack.callback(finish)
            parameters = run.partition[0].clone()
            emulated_cards.inject("hang", **where)
            run.handler.begin_step(run.collect(1))
            emulated_cards.wait_for("run-hung")
            return Begun(run, parameters, lambda: (run.handler.traffic() - before).folders)

        yield begin


def test_what_goes_on_beside_a_run(begun: Begin, emulated_cards: EmulatedCards) -> None:
    """While one tasklet is computed, the next are read from the SSD and the gradient of one arrives.

    The parameters of the tasklet before have arrived, and its state is on the SSD.
    """
    step = begun(skipped=1)
    extents = step.run.layout.extents

    def arrived() -> int:
        return len([event for event in emulated_cards.events("to-end") if int(event.fields[1]) > 64])

    await_that(lambda: step.folders()[0].write_bytes == extents.extents[0].nbytes)
    await_that(lambda: arrived() == 3 and step.folders()[0].read_bytes == 5 * extents.extents[0].nbytes)
    numel = extents.tasklet_numel
    pairs = zip(step.run.partition[0].split(numel), step.parameters.split(numel), strict=True)
    assert sum(not torch.equal(now, then) for now, then in pairs) == 1
    assert len(emulated_cards.events("run-end")) == 1


def test_a_card_goes_on_while_another_is_held(begun: Begin, emulated_cards: EmulatedCards) -> None:
    """All of one card's tasklets are computed, and their state written, while the other's first kernel is held."""
    step = begun(CASE.but(num_devices=2), card=0)
    extents, assigned = step.run.layout.extents.extents, step.run.store.assigned
    own = [extent.nbytes for extent, device in zip(extents, assigned, strict=True) if device]
    emulated_cards.wait_for("run-end", card=1, count=len(own))
    await_that(lambda: step.folders()[1].write_bytes == sum(own))
    assert not emulated_cards.events("run-end", card=0)
    assert step.folders()[0].write_bytes == 0


def test_parameters_are_there_before_their_state_is_written(begun: Begin, emulated_cards: EmulatedCards) -> None:
    """A wait for a tasklet's parameters does not wait for the slow write of its state."""
    throttles: list[Throttle] = []

    def prepare(run: Run) -> None:
        throttles.append(Throttle(pipelines(run)[0], run.store.files))

    step = begun(CASE.but(shapes=((5_000, 0, 0, 0),)), prepare)
    # The state has been read: only its write is slow from now on.
    throttles[0].bytes_per_second = 2 * step.run.layout.extents.extents[0].nbytes
    emulated_cards.release()
    step.run.handler.step.wait([0])
    assert step.folders()[0].write_bytes == 0
    assert not torch.equal(step.run.partition[0], step.parameters)
    throttles[0].bytes_per_second = 0
