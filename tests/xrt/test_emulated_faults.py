"""Tests faults and concurrent runs of an emulated SmartSSD, as XRT's users see them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from threading import Thread

import numpy as np
import pytest

from tests.helpers.runif import RunIf
from tests.helpers.waiting import join
from tests.xrt.api import Device, Flags, State, XrtError
from tests.xrt.cards import EmulatedCards
from tests.xrt.probe import BYTES, Probe, floats

pytestmark = RunIf(xrt=True)

POISON = 0xA5


def test_two_cards_run_at_the_same_time(emulated_cards: EmulatedCards, probes: list[Probe]) -> None:
    """With each card driven by its own thread, both runs have begun before one ends."""
    emulated_cards.inject("hang", card=0)
    emulated_cards.inject("hang", card=1)
    states: list[State] = []
    threads = [Thread(target=lambda probe=probe: states.append(probe.run().wait())) for probe in probes]
    for thread in threads:
        thread.start()
    emulated_cards.wait_for("run-hung", count=2)
    emulated_cards.release()
    for thread in threads:
        join(thread)
    assert states == [State.COMPLETED] * 2
    order = [(event.name, event.card) for event in emulated_cards.events("run-begin", "run-end")]
    assert {card for _, card in order[:2]} == {0, 1} == {card for _, card in order[2:]}
    assert [name for name, _ in order] == ["run-begin"] * 2 + ["run-end"] * 2


def test_two_compute_units_of_a_card_run_at_the_same_time(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """Runs of one unit wait for each other, but not for those of the other unit."""
    emulated_cards.inject("hang")
    first, waiting = probe.run(), probe.run()
    emulated_cards.wait_for("run-hung")
    other = probe.run(unit="probe:{probe_2}", data=probe.buffer(BYTES), parameter=probe.buffer(BYTES))
    assert other.wait() is State.COMPLETED
    assert waiting.wait(1) is State.TIMEOUT
    emulated_cards.release()
    assert first.wait() is State.COMPLETED and waiting.wait() is State.COMPLETED
    order = [(event.name, int(event.fields[0])) for event in emulated_cards.events("run-begin", "run-end")]
    assert order.index(("run-end", 0)) < order.index(("run-begin", 1))


def test_syncs_go_on_while_a_run_is_under_way(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """Syncs in both directions go on while a run is in progress."""
    other = probe.buffer(BYTES)
    emulated_cards.inject("hang")
    run = probe.run()
    emulated_cards.wait_for("run-hung")
    other.upload()
    other.download()
    emulated_cards.release()
    assert run.wait() is State.COMPLETED
    names = [event.name for event in emulated_cards.events("run-begin", "to-end", "from-end", "run-end", card=0)]
    assert names[names.index("run-begin") :] == ["run-begin", "to-end", "from-end", "run-end"]


def test_run_after_its_timeout_completes_late(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """A run that completes after its timeout writes only then, so it keeps its buffers until it has returned."""
    emulated_cards.inject("hang")
    run = probe.run()
    assert run.wait(5) is State.TIMEOUT
    emulated_cards.wait_for("run-hung")
    assert run.wait(5) is State.TIMEOUT
    assert run.state() is State.RUNNING
    assert (floats(probe.data) == 1).all()
    emulated_cards.release()
    assert run.wait() is State.COMPLETED
    assert (floats(probe.data) == 3).all()


@pytest.mark.parametrize(("kind", "state"), [("error", State.ERROR), ("abort", State.ABORT)])
def test_failed_run_leaves_nothing_of_use(emulated_cards: EmulatedCards, probe: Probe, kind: str, state: State) -> None:
    """Only the chosen run fails, and it leaves poison; the runs before and after it complete."""
    emulated_cards.inject(kind, skipped=1)
    assert probe.run().wait() is State.COMPLETED
    assert probe.run().wait() is state
    assert (probe.data.map() == POISON).all()
    assert probe.run().wait() is State.COMPLETED
    assert emulated_cards.counter("runs_failed") == 1


def test_corrupt_output_has_one_wrong_bit(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """A run with a corrupt output completes, as on a card whose memory fails."""
    element, bit = 5, 22
    emulated_cards.inject("corrupt", pointer=2, bit=32 * element + bit)
    assert probe.run().wait() is State.COMPLETED
    expected = np.full(BYTES // 4, 3, np.float32)
    expected.view(np.uint32)[element] ^= 1 << bit
    assert (floats(probe.data) == expected).all()


def test_corrupt_status_has_one_wrong_bit(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """The wrong bit of a synced buffer arrives with the sync."""
    emulated_cards.inject("corrupt", pointer=4, bit=1)
    assert probe.run().wait() is State.COMPLETED
    probe.status.download()
    assert probe.status.map().view(np.uint32).tolist() == [2] + [0] * 15


def _upload(probe: Probe) -> None:
    probe.gradient.upload()


def _allocate(probe: Probe) -> None:
    probe.buffer(BYTES)


def _start(probe: Probe) -> None:
    assert probe.run(last=0).wait() is State.COMPLETED


@pytest.mark.parametrize(("kind", "call"), [("sync", _upload), ("alloc", _allocate), ("submit", _start)])
def test_call_fails_once(
    emulated_cards: EmulatedCards, probes: list[Probe], kind: str, call: Callable[[Probe], None]
) -> None:
    """Only one call fails; those before and after it, and those of another card, succeed."""
    emulated_cards.inject(kind, card=1, skipped=1)
    call(probes[1])
    call(probes[0])
    with pytest.raises((XrtError, OSError)):
        call(probes[1])
    call(probes[1])


def test_lost_card_fails_whatever_is_asked(emulated_cards: EmulatedCards, probes: list[Probe]) -> None:
    """A lost card aborts runs in progress and fails every call; the other card works."""
    emulated_cards.inject("hang")
    run = probes[0].run()
    emulated_cards.wait_for("run-hung")
    emulated_cards.lose(0)
    assert run.wait() is State.ABORT
    for call in (_upload, _allocate, _start):
        with pytest.raises(XrtError):
            call(probes[0])
    assert probes[1].run().wait() is State.COMPLETED


def test_card_is_lost_when_a_run_begins(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """A fault can make a card lost at the moment a run begins."""
    emulated_cards.inject("lost")
    assert probe.run().wait() is State.ABORT
    with pytest.raises(XrtError):
        _upload(probe)


def test_without_p2p_there_are_no_p2p_buffers(emulated_cards: EmulatedCards, devices: list[Device]) -> None:
    """Without P2P, ordinary buffers and the other card's P2P buffers still work."""
    emulated_cards.set("p2p", 0, card=1)
    with pytest.raises(XrtError):
        devices[1].allocate(BYTES, Flags.P2P)
    devices[1].allocate(BYTES).free()
    devices[0].allocate(BYTES, Flags.P2P).free()


def test_card_memory_is_as_large_as_is_set(emulated_cards: EmulatedCards, devices: list[Device]) -> None:
    """An allocation beyond the set size fails, and freed memory can be allocated again."""
    emulated_cards.set("dram_mib", 2, card=0)
    for _ in range(2):
        first = devices[0].allocate(1 << 20)
        with pytest.raises(XrtError):
            devices[0].allocate((1 << 20) + 1)
        first.free()
    assert emulated_cards.counter("peak_bytes") == 1 << 20


@pytest.mark.parametrize("setting", ["latency_us", "kernel_mib_per_s", "dma_mib_per_s"])
def test_slow_card_takes_longer_than_a_fast_one(
    emulated_cards: EmulatedCards, probes: list[Probe], setting: str
) -> None:
    """A slow card, which would take 16 seconds, is still at work when the other has done three times as much."""
    emulated_cards.set(setting, 16_000_000 if setting == "latency_us" else 1, card=0)
    kind = "to" if setting == "dma_mib_per_s" else "run"
    emulated_cards.set("dram_mib", 64)
    large = [probe.buffer(1 << 24) for probe in probes]

    def work(card: int) -> None:
        large[card].upload() if kind == "to" else probes[card].run(parameter=large[card]).wait()

    slow = Thread(target=work, args=[0])
    slow.start()
    emulated_cards.wait_for(f"{kind}-begin", card=0, count=2 if kind == "to" else 1)
    for _ in range(3):
        work(1)
    emulated_cards.release(0)
    join(slow)
    assert [event.card for event in emulated_cards.events(f"{kind}-end")][-4:] == [1, 1, 1, 0]


def test_the_channel_is_shared_fairly(emulated_cards: EmulatedCards, probes: list[Probe]) -> None:
    """A small sync of one card ends before a large one of another, which takes 16 seconds unless it is released.

    They take turns: no two overlap, and each sync gets as much time as its bytes take alone.
    """
    emulated_cards.set("channel_mib_per_s", 1)
    emulated_cards.set("dram_mib", 64)
    large, small = probes[0].buffer(1 << 24), probes[1].buffer(1 << 12)
    slow = Thread(target=large.upload)
    begun = _count(emulated_cards, "to-begin", card=0)
    ended = _count(emulated_cards, "to-end", card=0)
    slow.start()
    emulated_cards.wait_for("to-begin", card=0, count=begun + 1)
    emulated_cards.wait_for("turn", card=0)
    small.upload()
    assert _count(emulated_cards, "to-end", card=0) == ended
    emulated_cards.release(0)
    join(slow)
    turns = [tuple(map(int, event.fields)) for event in emulated_cards.events("turn")]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(turns)))
    of_small = [tuple(map(int, event.fields)) for event in emulated_cards.events("turn", card=1)]
    assert sum(end - begin for begin, end in of_small) == 1_000_000_000 * 4096 // (1 << 20)


def _count(cards: EmulatedCards, name: str, *, card: int) -> int:
    return sum(event.card == card for event in cards.events(name))


def test_unknown_names_are_refused(emulated_cards: EmulatedCards) -> None:
    """Misspelled names are refused, so that the test fails."""
    with pytest.raises(ValueError, match="no fault hangs"):
        emulated_cards.inject("hangs")
    with pytest.raises(ValueError, match="no setting dram"):
        emulated_cards.set("dram", 1)
    with pytest.raises(ValueError, match="no counter runs"):
        emulated_cards.counter("runs")
