"""When cards fail or are late under a transfer handler, the host takes over, and every bit comes out the same."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import (
    DeviceError,
    SmartInfinityError,
    StorageCorruptError,
    StorageError,
    StorageLockedError,
)
from lightning_smartinfinity.devices import host
from lightning_smartinfinity.devices.smartssd import SmartSSDDevice, device, unreturned, worker
from lightning_smartinfinity.pipeline.parameters import submissions
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders import direct
from tests.helpers.card_runs import beside_host, cards, pipelines, settled_host, setup_of, state_files
from tests.helpers.interrupts import Interrupt
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import Hold, inject
from tests.helpers.runif import RunIf
from tests.helpers.waiting import LIMIT, await_that, lenient
from tests.pipeline.harness import Case, Run, assert_equal, everything, running, step_of_all
from tests.storage.makers import flip
from tests.xrt.cards import EmulatedCards
from tests.xrt.fixtures import Holder

pytestmark = RunIf(xrt=True)

NUM_FAILURES = 100
FEW_FAILURES = 20
CASE = Case(dtype=torch.bfloat16, num_devices=2, shapes=((9_000, 0, 0, 0), (6_000, 3, 1, 0), (7_000, 0, 0, 1)))

Result = tuple[dict[str, torch.Tensor], list[bytes]]
"""State and files after some steps."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Result]:
    """The host's results after numbers of steps."""
    with running(tmp_path_factory.mktemp("host"), CASE, device=settled_host) as host:
        host.steps(range(FEW_FAILURES))
        few = host.state(), state_files(host)
        host.steps(range(FEW_FAILURES, NUM_FAILURES))
        return {FEW_FAILURES: few, NUM_FAILURES: (host.state(), state_files(host))}


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "failed: " in message]


STORAGE = {
    "read": ("fail_read_at", errno.EIO),
    "write": ("fail_write_at", errno.EIO),
    "full": ("fail_write_at", errno.ENOSPC),
    "short transfers alone": ("", 0),
}
KINDS = ("error", "abort", "corrupt", "submit", "sync", "lost", "hang", *STORAGE)
USUAL = ("abort", "corrupt", "write", "short transfers alone")


@pytest.mark.parametrize(
    ("kind", "number"),
    long_but(
        [*((kind, NUM_FAILURES) for kind in USUAL), ("hang", FEW_FAILURES)],
        [*((kind, NUM_FAILURES) for kind in KINDS), ("hang", FEW_FAILURES)],
    ),
)
def test_a_hundred_failures(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    expected: dict[int, Result],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    number: int,
) -> None:
    """A failure in each step, anywhere and on either card, changes no bit, and the card works in the next step.

    Transfers of state and trailers fail among many that are cut short. Those go on where they were cut.
    """
    monkeypatch.setattr(worker, "_MOST_FAILURES", 10 * NUM_FAILURES)
    choose, (where, code) = random.Random(kind), STORAGE.get(kind, ("", 0))
    device = cards(emulated_cards.build.xclbin, timeout=lenient(0.03, pauses=5) if kind == "hang" else LIMIT)
    with running(tmp_path, CASE, device=device) as run:
        for step in range(number):
            card = choose.randrange(2)
            if kind in STORAGE:
                fault = {where: choose.randrange(2), "errno": code} if code else {}
                inject(pipelines(run)[card], short_transfer_every=choose.randrange(2, 5), **fault)
            else:
                # The status is corrupted; corruption of other memory would be noticed only when it is read again.
                bit = choose.randrange(128)
                emulated_cards.inject(kind, card=card, skipped=choose.randrange(2), pointer=8, bit=bit)
            run.step(step)
            if kind == "lost":
                emulated_cards.reset()
            inject(pipelines(run)[card])
            await_cards(run, emulated_cards)
        state, files = expected[number]
        assert_equal(run.state(), state)
        assert state_files(run) == files
    assert all(os.strerror(code) in message for message in failures(caplog) if code)
    # A machine under load may take a slow run for a hung one, too.
    wanted = 0 if kind == "short transfers alone" else number
    assert len(failures(caplog)) == wanted or (kind == "hang" and len(failures(caplog)) > wanted)


def await_cards(run: Run, emulated_cards: EmulatedCards) -> None:
    """Wait until all that was given up has returned, also a run that hangs only after a slow one was given up."""

    def returned() -> bool:
        emulated_cards.release()
        return not any(pipeline.busy for pipeline in pipelines(run))

    await_that(returned)


def test_a_card_that_fails_every_step(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture
) -> None:
    """A card is given up for the training after three failures in a row; a success restarts the count."""
    with beside_host(tmp_path, CASE, emulated_cards.build.xclbin) as (run, host):
        for step, fails in enumerate((1, 1, 0, 1, 1, 1)):
            if fails:
                emulated_cards.inject("error", card=1)
            run.step(step)
        begun = [emulated_cards.counter("runs_begun", card) for card in range(2)]
        run.steps([6, 7])
        assert emulated_cards.counter("runs_begun", 1) == begun[1] and emulated_cards.counter("runs_begun") > begun[0]
        host.steps(range(8))
        run.device.finish()
    assert len(failures(caplog)) == 5
    (told,) = (message for message in caplog.messages if "is not used any more" in message)
    assert "card 1" in told and "smart-infinity selftest" in told
    with running(tmp_path / "again", CASE, device=cards(emulated_cards.build.xclbin)) as run:
        run.step(0)
        assert emulated_cards.counter("runs_begun", 1) > begun[1]


def test_a_hang_is_waited_for_once(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture
) -> None:
    """Tasklets that were read meanwhile are not queued behind a hung run; the host updates them at once.

    Until the run returns, the card gets no work. The log says so once.
    """
    case, deadline = CASE.but(num_devices=1, num_buffers=6, shapes=((40_000, 0, 0, 0),)), lenient()
    with beside_host(tmp_path, case, emulated_cards.build.xclbin, timeout=deadline) as (run, host):
        emulated_cards.inject("hang")
        run.step(1)
        # One more may have been on its way by then.
        queued = len(emulated_cards.events("run-queued"))
        assert queued <= 2 < run.layout.extents.num_tasklets
        run.steps([2, 4])
        assert pipelines(run)[0].busy and len(emulated_cards.events("run-queued")) == queued
        await_cards(run, emulated_cards)
        run.step(5)
        assert len(emulated_cards.events("run-queued")) > queued
        host.steps([1, 2, 4, 5])
    assert f"did not return within {1000 * deadline:.0f} ms. The host updates its" in caplog.text
    told = ("is not used until all that was asked of it returns", "is used again")
    assert [caplog.text.count(words) for words in told] == [1, 1]


def test_close_with_a_hung_run(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Closing does not wait for a hung run; memory that the run may still write is freed once it has returned."""
    before = emulated_cards.counter("num_buffers", 0)
    device = cards(emulated_cards.build.xclbin, timeout=lenient())
    for number in range(2):
        with running(tmp_path / str(number), CASE, device=device) as run:
            emulated_cards.inject("hang", card=0)
            run.handler.begin_step(run.collect(0))
            emulated_cards.wait_for("run-hung", count=number + 1)
            if number:
                run.handler.commit()
        assert emulated_cards.counter("num_buffers", 0) > before
        emulated_cards.release()
        run.device.close()
    await_that(unreturned.close_returned)
    assert emulated_cards.counter("num_buffers", 0) == before


def test_a_card_that_takes_its_ssd_along(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """If the host cannot take over either, our own error is raised; the step is rolled back once the SSD answers."""
    with running(tmp_path, CASE, device=cards(emulated_cards.build.xclbin)) as run:
        run.step(0)
        before = run.state()
        emulated_cards.inject("error", card=0)
        assert isinstance(run.device, SmartSSDDevice)
        inject(run.device._host.pipeline, fail_read_at=0)
        run.handler.begin_step(run.collect(1))
        with pytest.raises(StorageError, match=r"state\.bin"):
            run.handler.commit()
        inject(run.device._host.pipeline)
        run.roll_back_to(before)
        run.step(1)


@pytest.mark.parametrize("fault", ["fail_read_at", "fail_write_at"])
def test_p2p_that_fails_in_fp32(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """A tasklet whose write failed has updated its parameters by then, so its masters come from storage."""
    with beside_host(tmp_path, CASE.but(dtype=torch.float32), emulated_cards.build.xclbin) as (run, host):
        inject(pipelines(run)[0], **{fault: 1})
        for each in (run, host):
            each.steps(range(3))
    assert len(failures(caplog)) == 1


def test_state_that_is_damaged_on_storage(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture
) -> None:
    """The card finds the damage by the kernel's checksum, the host by its own; it is an error of storage."""
    with running(tmp_path, CASE, device=cards(emulated_cards.build.xclbin)) as run:
        run.step(0)
        place = run.layout.extents.place_offset(int(run.store.placement.positions[1]))
        flip(Path(run.store.files[1].path), place + 1000)
        run.handler.begin_step(run.collect(1))
        with pytest.raises(StorageCorruptError, match=r"tasklet 1"):
            run.handler.commit()
    assert "array 0 arrived with another checksum than it was written with" in failures(caplog)[0]


# ---- many late requests of each kind, and many failed allocations: a hundred of each with ``--long``, or else twenty


MOST_STEPS = 3 * NUM_FAILURES  # a machine under load may be late with something else first
SMALL = CASE.but(shapes=((3_000, 0, 0, 0), (2_000, 3, 1, 0), (2_500, 0, 0, 1)))
ROUTES = ("host", "storage")
LATE = ("sync", "read", "write that an SSD recovers", "write")


def begin(kind: str, run: Run, emulated_cards: EmulatedCards, choose: random.Random) -> Callable[[], bool]:
    """Prepare a late request; return the function that lets it return, and returns whether there was one."""
    card = choose.randrange(2)
    if kind == "sync":
        before = len(emulated_cards.events("sync-stalled"))
        emulated_cards.inject("stall", card=card, skipped=choose.randrange(3))

        def release() -> bool:
            emulated_cards.release()
            return len(emulated_cards.events("sync-stalled")) > before

        return release
    hold = Hold(pipelines(run)[card], **{f"{kind.split()[0]}_at": choose.randrange(2)})  # of state or of a trailer

    def release_hold() -> bool:
        held = hold.count
        hold.release()
        return held == 1

    return release_hold


@pytest.mark.parametrize(
    ("route", "kind"),
    long_but(
        [("storage", "read"), ("storage", "write that an SSD recovers"), ("host", "write")],
        itertools.product(ROUTES, LATE),
    ),
)
def test_many_late_requests(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    route: str,
    kind: str,
) -> None:
    """The host takes over for a late sync or read, and for a late write that returns while it is waited for.

    Another late write ends its step, which is rolled back and redone. The card works again afterwards.
    """
    monkeypatch.setattr(worker, "_MOST_FAILURES", 10 * MOST_STEPS)
    if kind == "write":
        monkeypatch.setattr(worker, "_RECOVERY", 0.0)
    most, num_failures = NUM_FAILURES if request.config.getoption("long") else FEW_FAILURES, 0
    settings, choose = {"timeout": lenient(0.01, pauses=5), "gradient_route": route}, random.Random(0)
    with beside_host(tmp_path, SMALL, emulated_cards.build.xclbin, **settings) as (run, host):
        for step in range(MOST_STEPS):
            await_cards(run, emulated_cards)
            release, late = begin(kind, run, emulated_cards, choose), list[bool]()
            with monkeypatch.context() as patched:
                if kind == "write that an SSD recovers":
                    patched.setattr(worker.time, "sleep", lambda _, late=late, release=release: late.append(release()))
                while run.handler.generation == step:
                    try:
                        run.step(step)
                    except DeviceError:
                        assert kind == "write"
                        run.handler.roll_back()
                        late.append(release())
                        await_cards(run, emulated_cards)
            late.append(release() and "write" not in kind)
            num_failures += any(late)
            host.step(step)
            if num_failures == most:
                break
        await_cards(run, emulated_cards)
    assert num_failures == most


@pytest.mark.long
@pytest.mark.parametrize("route", ROUTES)
def test_many_allocations_that_fail(tmp_path: Path, emulated_cards: EmulatedCards, route: str) -> None:
    """A failed allocation stops the training and leaves nothing allocated; a new one then gives the host's bits."""
    device = cards(emulated_cards.build.xclbin, gradient_route=route)
    before = [emulated_cards.counter("num_buffers", card) for card in range(2)]
    with running(tmp_path / "card", SMALL, device=device):
        num_allocations = emulated_cards.counter("num_buffers", 0) - before[0]
    for number in range(NUM_FAILURES):
        emulated_cards.inject("alloc", card=number % 2, skipped=number // 2 % num_allocations)
        with pytest.raises(DeviceError, match=rf"emulated card {number % 2}: .*is unavailable: xrtBOAlloc"):
            Run(tmp_path / "card", SMALL, device=device)
        assert [emulated_cards.counter("num_buffers", card) for card in range(2)] == before
    with beside_host(tmp_path, SMALL, emulated_cards.build.xclbin, gradient_route=route) as runs:
        for each in runs:
            each.steps(range(3))


# ---- who may go on when a card's writes do not return


@pytest.fixture
def deadline() -> float:
    """Seconds after which cards abandon what does not return."""
    return lenient(2.0)  # a virtual machine may pause for a second


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an SSD no further time to recover."""
    monkeypatch.setattr(worker, "_RECOVERY", 0.0)


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
        run.roll_back_to(before)
        with pytest.raises(DeviceError, match=r"it may still overwrite.*step before is whole"):
            run.handler.begin_step(run.collect(1))
        run.roll_back_to(before)
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
    device = cards(emulated_cards.build.xclbin, sharers=bank // (1 << 20))
    with running(tmp_path / "b", CASE.but(num_buffers=64), device=device) as run:
        run.step(0)
        assert 1 << 19 < emulated_cards.counter("card_bytes", 0) <= 1 << 20


def test_no_such_card_kernel_or_file(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """XRT's refusals become our errors, which name the card. Without P2P the SSD can reach no buffer."""
    build = emulated_cards.build
    for number, (path, num_devices, p2p, told) in enumerate(
        [
            (build.xclbin, 3, 1, r"emulated card 2: .*XILINX_XRT"),
            (build.probe_xclbin, 2, 1, r"emulated card 0: .*adamw_update.* of this version: make -C hls xclbin"),
            (tmp_path / "none", 2, 1, r"emulated card 0: .*built for the card"),
            (build.xclbin, 2, 0, "P2P"),
        ]
    ):
        emulated_cards.set("p2p", p2p)
        with pytest.raises(DeviceError, match=told):
            Run(tmp_path / str(number), CASE.but(num_devices=num_devices), device=cards(path))


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
    with beside_host(tmp_path, CASE, emulated_cards.build.xclbin) as (run, host_run):
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
            step_of_all(host_run, step)


def interrupted_step(run: Run, step: int, line: int, *, incremental: bool) -> bool:
    """Run a step with Ctrl-C on this line, and return whether there was such a line."""
    plan = everything(run.collect(step))
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
        step_of_all(run, step)
