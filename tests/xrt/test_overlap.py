"""Tests by the order of events what overlaps: a run that hangs keeps the card's kernel until it is released."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.devices.smartssd import SmartSSDDevice
from tests.helpers.card_runs import cards, same_as_host, settled_host
from tests.helpers.native_testing import Throttle
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that
from tests.pipeline.harness import Case, Run, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

CASE = Case(dtype=torch.bfloat16, shapes=((40_000, 0, 0, 0),), num_buffers=4)


@pytest.fixture(autouse=True)
def nobody_waits_for_what_is_held(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Assert that no step waited until the card's timeout, after which the host would have taken over."""
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if "failed: " in record.getMessage()]


def finish(run: Run, folder: Path, cards: EmulatedCards) -> None:
    """Let the step end, and compare it with the host's."""
    cards.release()
    run.handler.commit()
    with running(folder, run.case, device=settled_host) as host:
        host.step(1)
        same_as_host(run, host)


def test_cards_work_at_the_same_time(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Both cards have begun a run before either has ended one, so no card waits for the other."""
    case = CASE.but(num_devices=2)
    with running(tmp_path / "card", case, device=cards(emulated_cards.build.xclbin)) as run:
        for card in range(2):
            emulated_cards.inject("hang", card=card)
        run.handler.begin_step(run.collect(1))
        emulated_cards.wait_for("run-hung", count=2)
        assert {event.card for event in emulated_cards.events("run-hung")} == {0, 1}
        assert not emulated_cards.events("run-end")
        finish(run, tmp_path / "host", emulated_cards)


def test_gradients_and_reads_go_on_beside_a_run(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """While the first tasklet is computed, the next are read from the SSD and the gradient of one arrives."""
    with running(tmp_path / "card", CASE, device=cards(emulated_cards.build.xclbin)) as run:
        before = run.handler.traffic()
        emulated_cards.inject("hang")
        run.handler.begin_step(run.collect(1))
        emulated_cards.wait_for("run-hung")
        extent = run.layout.extents.extents[0].nbytes

        def arrived() -> int:
            return len([event for event in emulated_cards.events("to-end") if int(event.fields[1]) > 64])

        def read_bytes() -> int:
            return sum(folder.read_bytes for folder in (run.handler.traffic() - before).folders)

        await_that(lambda: arrived() == 2 and read_bytes() == 4 * extent)
        assert not emulated_cards.events("run-end")
        finish(run, tmp_path / "host", emulated_cards)


def test_parameters_come_first_and_state_is_written_beside_the_next_run(
    tmp_path: Path, emulated_cards: EmulatedCards
) -> None:
    """While one tasklet is computed, the parameters of the one before have arrived and its state is on the SSD."""
    with running(tmp_path / "card", CASE, device=cards(emulated_cards.build.xclbin)) as run:
        before, parameters = run.handler.traffic(), run.partition[0].clone()
        emulated_cards.inject("hang", skipped=1)
        run.handler.begin_step(run.collect(1))
        emulated_cards.wait_for("run-hung")
        extent = run.layout.extents.extents[0].nbytes
        await_that(lambda: sum(folder.write_bytes for folder in (run.handler.traffic() - before).folders) == extent)
        numel = run.layout.extents.tasklet_numel
        pairs = zip(run.partition[0].split(numel), parameters.split(numel), strict=True)
        assert sum(not torch.equal(now, then) for now, then in pairs) == 1
        assert len(emulated_cards.events("run-end")) == 1
        finish(run, tmp_path / "host", emulated_cards)


def test_a_card_goes_on_while_another_is_held(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """All of one card's tasklets are computed, and their state written, while the other's first kernel is held."""
    with running(tmp_path / "card", CASE.but(num_devices=2), device=cards(emulated_cards.build.xclbin)) as run:
        before, assigned = run.handler.traffic(), run.store.assigned
        extents = [extent.nbytes for extent, device in zip(run.layout.extents.extents, assigned, strict=True) if device]
        emulated_cards.inject("hang", card=0)
        run.handler.begin_step(run.collect(1))
        emulated_cards.wait_for("run-hung", card=0)
        emulated_cards.wait_for("run-end", card=1, count=len(extents))
        await_that(lambda: (run.handler.traffic() - before).folders[1].write_bytes == sum(extents))
        assert not emulated_cards.events("run-end", card=0)
        assert (run.handler.traffic() - before).folders[0].write_bytes == 0
        finish(run, tmp_path / "host", emulated_cards)


def test_parameters_are_there_before_their_state_is_written(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A wait for a tasklet's parameters does not wait for the slow write of its state."""
    case = CASE.but(shapes=((5_000, 0, 0, 0),))
    with running(tmp_path / "card", case, device=cards(emulated_cards.build.xclbin)) as run:
        assert isinstance(run.device, SmartSSDDevice)
        before, parameters = run.handler.traffic(), run.partition[0].clone()
        throttle = Throttle(run.device._workers[0].pipeline, run.store.files)
        emulated_cards.inject("hang")
        run.handler.begin_step(run.collect(1))
        emulated_cards.wait_for("run-hung")
        # The state has been read: only its write is slow from now on.
        throttle.bytes_per_second = 2 * run.layout.extents.extents[0].nbytes
        emulated_cards.release()
        run.handler.step.wait([0])
        assert (run.handler.traffic() - before).folders[0].write_bytes == 0
        assert not torch.equal(run.partition[0], parameters)
        throttle.bytes_per_second = 0
        finish(run, tmp_path / "host", emulated_cards)
