"""When cards fail under a transfer handler, the host takes over, and every bit comes out the same."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import StorageCorruptError, StorageError
from lightning_smartinfinity.devices.smartssd import SmartSSDDevice, unreturned
from lightning_smartinfinity.devices.smartssd import worker as worker_module
from tests.helpers.card_runs import beside_host, cards, pipelines, settled_host, state_files
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject
from tests.helpers.runif import RunIf
from tests.helpers.waiting import LIMIT, await_that, lenient
from tests.pipeline.harness import Case, Run, assert_equal, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

NUM_FAILURES = 100
FEW_FAILURES = 20
CASE = Case(dtype=torch.bfloat16, num_devices=2, shapes=((9_000, 0, 0, 0), (6_000, 3, 1, 0), (7_000, 0, 0, 1)))
SLOW = LIMIT
SHORT = 0.03


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


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING):
        yield caplog


def failures(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if "failed: " in record.getMessage()]


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
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    number: int,
) -> None:
    """A failure in each step, anywhere and on either card, changes no bit, and the card works in the next step.

    Transfers of state and trailers fail among many that are cut short. Those go on where they were cut.
    """
    monkeypatch.setattr(worker_module, "_MOST_FAILURES", 10 * NUM_FAILURES)
    choose, (where, code) = random.Random(kind), STORAGE.get(kind, ("", 0))
    device = cards(emulated_cards.build.xclbin, timeout=lenient(SHORT, pauses=5) if kind == "hang" else SLOW)
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
    assert all(os.strerror(code) in message for message in failures(log) if code)
    # A machine under load may take a slow run for a hung one, too.
    wanted = 0 if kind == "short transfers alone" else number
    assert len(failures(log)) == wanted or (kind == "hang" and len(failures(log)) > wanted)


@pytest.mark.parametrize("array", range(3))
def test_state_that_was_corrupted_on_the_card(tmp_path: Path, emulated_cards: EmulatedCards, array: int) -> None:
    """Corruption is not noticed when it is written, as the CPU never sees it; the next read reports it."""
    with running(tmp_path, CASE, device=cards(emulated_cards.build.xclbin)) as run:
        run.step(0)
        emulated_cards.inject("corrupt", card=array % 2, pointer=4 + array, bit=5)
        run.step(1)
        with pytest.raises(StorageCorruptError, match="checksum"):
            run.step(2)


def await_cards(run: Run, emulated_cards: EmulatedCards) -> None:
    """Wait until all that was given up has returned, also a run that hangs only after a slow one was given up."""

    def returned() -> bool:
        emulated_cards.release()
        return not any(pipeline.busy for pipeline in pipelines(run))

    await_that(returned)


def test_a_card_that_fails_every_step(
    tmp_path: Path, emulated_cards: EmulatedCards, log: pytest.LogCaptureFixture
) -> None:
    """A card is given up for the training after three failures in a row; a success restarts the count."""
    with beside_host(tmp_path, CASE, emulated_cards.build.xclbin) as (run, host):
        for step, fails in enumerate((1, 1, 0, 1, 1, 1)):
            if fails:
                emulated_cards.inject("error", card=1)
            run.step(step)
        begun = [emulated_cards.counter("runs_begun", card) for card in range(2)]
        run.steps([6, 7])
        assert emulated_cards.counter("runs_begun", 1) == begun[1]
        assert emulated_cards.counter("runs_begun", 0) > begun[0]
        host.steps(range(8))
        run.device.finish()
    assert len(failures(log)) == 5
    (told,) = (record.getMessage() for record in log.records if "is not used any more" in record.getMessage())
    assert "card 1" in told and "smart-infinity selftest" in told
    with running(tmp_path / "again", CASE, device=cards(emulated_cards.build.xclbin)) as run:
        run.step(0)
        assert emulated_cards.counter("runs_begun", 1) > begun[1]


def test_a_hang_is_waited_for_once(
    tmp_path: Path, emulated_cards: EmulatedCards, log: pytest.LogCaptureFixture
) -> None:
    """Tasklets that were read meanwhile are not queued behind a hung run; the host updates them at once.

    Until the run returns, the card gets no work. The log says so once.
    """
    case, deadline = CASE.but(num_devices=1, num_buffers=6, shapes=((40_000, 0, 0, 0),)), lenient()

    def num_queued() -> int:
        return len(emulated_cards.events("run-queued"))

    with beside_host(tmp_path, case, emulated_cards.build.xclbin, timeout=deadline) as (run, host):
        emulated_cards.inject("hang")
        run.step(1)
        # One more may have been on its way by then.
        queued = num_queued()
        assert queued <= 2 < run.layout.extents.num_tasklets
        run.steps([2, 4])
        assert pipelines(run)[0].busy and num_queued() == queued
        await_cards(run, emulated_cards)
        run.step(5)
        assert num_queued() > queued
        host.steps([1, 2, 4, 5])
    assert f"did not return within {1000 * deadline:.0f} ms. The host updates its" in log.text
    assert log.text.count("is not used until all that was asked of it returns") == 1
    assert log.text.count("is used again") == 1


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
        run.handler.roll_back()
        assert_equal(run.state(), before)
        run.step(1)


@pytest.mark.parametrize("fault", ["fail_read_at", "fail_write_at"])
def test_p2p_that_fails_in_fp32(
    tmp_path: Path, emulated_cards: EmulatedCards, log: pytest.LogCaptureFixture, fault: str
) -> None:
    """A tasklet whose write failed has updated its parameters by then, so its masters come from storage."""
    with beside_host(tmp_path, CASE.but(dtype=torch.float32), emulated_cards.build.xclbin) as (run, host):
        inject(pipelines(run)[0], **{fault: 1})
        for each in (run, host):
            each.steps(range(3))
    assert len(failures(log)) == 1


def test_state_that_is_damaged_on_storage(
    tmp_path: Path, emulated_cards: EmulatedCards, log: pytest.LogCaptureFixture
) -> None:
    """The card finds the damage by the kernel's checksum, the host by its own; it is an error of storage."""
    with running(tmp_path, CASE, device=cards(emulated_cards.build.xclbin)) as run:
        run.step(0)
        path = Path(run.store.files[1].path)
        content = bytearray(path.read_bytes())
        place = int(run.store.placement.positions[1]) * run.layout.extents.place_bytes
        content[place + 1000] ^= 4
        path.write_bytes(content)
        run.handler.begin_step(run.collect(1))
        with pytest.raises(StorageCorruptError, match=r"tasklet 1"):
            run.handler.commit()
    assert "array 0 arrived with another checksum than it was written with" in failures(log)[0]
