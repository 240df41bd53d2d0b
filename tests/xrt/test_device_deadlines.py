"""Tests who may go on under a transfer handler when a card's writes do not return."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import DeviceError, StorageError, StorageLockedError
from lightning_smartinfinity.devices.smartssd import unreturned
from lightning_smartinfinity.devices.smartssd import worker as worker_module
from lightning_smartinfinity.storage import recover_store
from tests.helpers.card_runs import beside_host, cards, pipelines
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that, lenient
from tests.pipeline.harness import Case, Run, assert_equal, running
from tests.xrt.cards import EmulatedCards
from tests.xrt.fixtures import Holder

pytestmark = RunIf(xrt=True)

CASE = Case(dtype=torch.bfloat16, num_devices=2, shapes=((9_000, 0, 0, 0), (6_000, 3, 1, 0), (7_000, 0, 0, 1)))


@pytest.fixture
def deadline() -> float:
    """Seconds after which cards abandon what does not return."""
    return lenient(2.0)  # a virtual machine may pause for a second


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an SSD no further time to recover."""
    monkeypatch.setattr(worker_module, "_RECOVERY", 0.0)


@pytest.mark.usefixtures("hasty")
def test_a_late_write_ends_the_step(
    tmp_path: Path, emulated_cards: EmulatedCards, deadline: float, caplog: pytest.LogCaptureFixture, hold: Holder
) -> None:
    """A late write ends the step, as nobody else may write to its place; no step begins until it returns.

    The log does not promise that the host takes over.
    """
    with beside_host(tmp_path, CASE, emulated_cards.build.xclbin, timeout=deadline) as (run, host):
        run.step(0)
        before = run.state()
        held = hold(pipelines(run)[0], write_at=1)
        run.handler.begin_step(run.collect(1))
        for _ in range(2):
            with pytest.raises(DeviceError, match=r"card 0 has not returned from writing \d+ bytes at offset \d+"):
                run.handler.commit()
        run.handler.roll_back()
        assert_equal(run.state(), before)
        with pytest.raises(DeviceError, match=r"it may still overwrite.*step before is whole"):
            run.handler.begin_step(run.collect(1))
        run.handler.roll_back()
        assert_equal(run.state(), before)
        values = {index: run.handler.state.read_parameter(index) for index in range(len(CASE.shapes))}
        with pytest.raises(DeviceError, match="it may still overwrite"):
            run.handler.state.modify(values)
        held.release()
        await_that(lambda: not pipelines(run)[0].busy)
        run.step(1)
        host.steps(range(2))
    assert "The host updates" not in caplog.text


@pytest.mark.usefixtures("hasty")
def test_a_store_that_may_still_be_written(
    tmp_path: Path, emulated_cards: EmulatedCards, deadline: float, hold: Holder
) -> None:
    """A closed and kept store stays locked until the late write returns; then it holds the step before."""
    case = CASE.but(keep=True)
    run = Run(tmp_path, case, device=cards(emulated_cards.build.xclbin, timeout=deadline))
    run.step(0)
    before = run.state()
    held = hold(pipelines(run)[0], write_at=0)
    run.handler.begin_step(run.collect(1))
    with pytest.raises(DeviceError, match="may still overwrite"):
        run.handler.commit()
    run.handler.close(remove=False)
    with pytest.raises(StorageLockedError):
        recover_store(run.folders)
    held.release()
    await_that(unreturned.close_returned)
    with running(tmp_path, case, recover=True) as again:
        assert again.store.generation == run.store.generation
        found = again.state()
        del found["partition"], before["partition"]  # nobody has read these back
        assert_equal(found, before)


@pytest.mark.parametrize(
    ("is_late", "told"),
    [(True, r"did not return within \d+ ms.*durability='step'"), (False, "failed: .*durability='step'")],
)
def test_one_place_each(
    tmp_path: Path, emulated_cards: EmulatedCards, deadline: float, hold: Holder, is_late: bool, told: str
) -> None:
    """Where state is overwritten nobody can take over: the step fails, says why, and cannot be rolled back."""
    device = cards(emulated_cards.build.xclbin, timeout=deadline)
    with running(tmp_path, CASE.but(durability="none"), device=device) as run:
        run.step(0)
        held = hold(pipelines(run)[0], write_at=0) if is_late else emulated_cards
        if not is_late:
            emulated_cards.inject("error")
        run.handler.begin_step(run.collect(1))
        with pytest.raises(DeviceError, match=rf"emulated card 0.*{told}"):
            run.handler.commit()
        held.release()
        await_that(lambda: not pipelines(run)[0].busy)
        with pytest.raises(StorageError, match="cannot be rolled back"):
            run.handler.roll_back()
