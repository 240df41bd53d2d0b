"""Tests who may go on under a transfer handler when a card's writes do not return."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import DeviceError, SmartInfinityError, StorageError, StorageLockedError
from lightning_smartinfinity.devices import host
from lightning_smartinfinity.devices.smartssd import device, unreturned, worker
from lightning_smartinfinity.devices.smartssd import worker as worker_module
from lightning_smartinfinity.pipeline.parameters import submissions
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders import direct
from tests.helpers.card_runs import beside_host, cards, pipelines, same_as_host, settled_host, setup_of
from tests.helpers.interrupts import Interrupt
from tests.helpers.long_cases import long_but
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


# ---- what keeps cards from being opened: the errors name the card and say what to do


def test_too_little_memory(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A ring that does not fit is refused with advice; on a shared card a smaller ring is chosen first."""
    emulated_cards.set("dram_mib", 1)
    with pytest.raises(DeviceError, match=r"TransferConfig\(tasklet_bytes"):
        Run(tmp_path / "a", CASE.but(num_buffers=64), device=cards(emulated_cards.build.xclbin))
    emulated_cards.set("dram_mib", 4096)
    bank = setup_of(1, emulated_cards.build.xclbin).xclbin.memory_bytes
    assert bank is not None
    sharers = bank // (1 << 20)
    with running(
        tmp_path / "b", CASE.but(num_buffers=64), device=cards(emulated_cards.build.xclbin, sharers=sharers)
    ) as run:
        run.step(0)
        assert 1 << 19 < emulated_cards.counter("card_bytes", 0) <= 1 << 20


def test_no_such_card_kernel_or_file(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """XRT's refusals become our errors, which name the card. Without P2P the SSD can reach no buffer."""
    build = emulated_cards.build
    for number, (path, changes, told) in enumerate(
        [
            (build.xclbin, {"num_devices": 3}, r"emulated card 2: .*XILINX_XRT"),
            (build.probe_xclbin, {}, r"emulated card 0: .*adamw_update.* of this version: make -C hls xclbin"),
            (tmp_path / "none", {}, r"emulated card 0: .*built for the card"),
        ]
    ):
        with pytest.raises(DeviceError, match=told):
            Run(tmp_path / str(number), CASE.but(**changes), device=cards(path))
    emulated_cards.set("p2p", 0)
    with pytest.raises(DeviceError, match="P2P"):
        Run(tmp_path / "p2p", CASE, device=cards(build.xclbin))


def test_files_in_the_page_cache(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in the page cache are refused: the card would read its SSD without what the host has written."""
    monkeypatch.setattr(direct, "choose_direct", lambda folder, name, choice: False)
    with pytest.raises(DeviceError, match=r"state\.bin.*page cache"):
        Run(tmp_path, CASE, device=cards(emulated_cards.build.xclbin))


# ---- Ctrl-C at any line of the device code, while a card fails: a step is committed only if its state is on storage


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
