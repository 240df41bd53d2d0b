"""The emulated SmartSSD shows what a test would miss on a sound one: missing syncs, bad pointers, late and slow runs.

Tests of the device count each kind of fault and find the same bits after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from hls.description import SMARTSSD, ComputeUnit, Design, Kernel
from hls.xclbin import xclbin
from tests.helpers.runif import RunIf
from tests.helpers.waiting import join
from tests.xrt.api import Buffer, Device, Flags, Run, State, XrtError
from tests.xrt.cards import EmulatedCards
from tests.xrt.probe import BEATS, BYTES, PROBE_DESIGN, Probe, floats

pytestmark = RunIf(xrt=True)

DEVICE_POISON, HOST_POISON = 0xA5, 0x5A


def test_missing_syncs_show(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """A P2P buffer needs no sync. Other outputs are gone from the host's memory as soon as the card has new ones.

    The card counts the syncs. A kernel reads the card's memory, whatever the host's memory says.
    """
    emulated_cards.reset()
    assert probe.run().wait() is State.COMPLETED
    probe.parameter.download()
    assert (floats(probe.data) == 3).all() and (floats(probe.parameter) == 1.5).all()
    probe.run(last=BEATS // 2).wait()
    changed, same = np.split(probe.parameter.map(), 2)
    assert (changed == HOST_POISON).all() and (same.view(np.float32) == 1.5).all()
    probe.parameter.download(BYTES // 2, BYTES // 4)
    names = ("runs_begun", "runs_completed", "syncs_to", "bytes_to", "syncs_from", "bytes_from")
    assert [emulated_cards.counter(name) for name in names] == [2, 2, 0, 0, 2, BYTES + BYTES // 2]
    forgotten = probe.buffer(BYTES)
    floats(forgotten)[:] = 2
    assert probe.run(gradient=forgotten).wait() is State.COMPLETED
    assert (floats(probe.data).reshape(2, -1) == [[5], [3]]).all()


def test_memory_is_poisoned_at_every_allocation(probe: Probe) -> None:
    """Poison replaces even the content of an earlier buffer at the same address."""
    addresses = []
    for _ in range(2):
        buffer = probe.device.allocate(BYTES, Flags.P2P)
        assert (buffer.map() == DEVICE_POISON).all()
        buffer.map()[:] = 1
        addresses.append(buffer.address)
        buffer.free()
    assert addresses[0] == addresses[1]


def past(short: str) -> Callable[[Probe, Buffer], Run]:
    """Return a function that runs one beat past this buffer."""

    def run(probe: Probe, ring: Buffer) -> Run:
        longer = {name: probe.buffer(2 * BYTES) for name in {"gradient", "data", "parameter"} - {short}}
        assert probe.run(**longer).wait() is State.COMPLETED
        return probe.run(last=BEATS + 1, **longer)

    return run


def past_an_array(probe: Probe, ring: Buffer) -> Run:
    data, parameter = ring.part(BYTES, 0), ring.part(2 * BYTES, BYTES)
    run = probe.run(gradient=probe.buffer(2 * BYTES), data=data, parameter=parameter, last=BEATS + 1)
    data.free()
    parameter.free()
    return run


def unaligned(probe: Probe, ring: Buffer) -> Run:
    part = ring.part(BYTES, 32)
    run = probe.run(parameter=part)
    part.free()
    return run


def freed(probe: Probe, ring: Buffer) -> Run:
    buffer = probe.device.allocate(BYTES)
    run = probe.prepare(parameter=buffer)
    buffer.free()
    run.start()
    return run


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (past("gradient"), "pointer 0 .*past its buffer"),
        (past("data"), "pointer 1 .*past its buffer"),
        (past("parameter"), "pointer 3 .*past its buffer"),
        # It ends within a page, as status beats and short gradients do.
        (lambda probe, ring: probe.run(parameter=probe.buffer(BYTES - 64)), "pointer 3"),
        (past_an_array, "pointer 1"),
        (unaligned, "not 64-byte aligned"),
        (freed, "lies in no buffer"),
    ],
)
def test_bad_pointers(
    emulated_cards: EmulatedCards, probe: Probe, begin: Callable[[Probe, Buffer], Run], reason: str
) -> None:
    """A beat outside of a pointer's buffer is an error that names the pointer, and the process goes on."""
    assert begin(probe, probe.buffer(3 * BYTES, Flags.P2P)).wait() is State.ERROR
    assert re.search(reason, " ".join(emulated_cards.events("run-end")[-1].fields[3:]))
    assert probe.run().wait() is State.COMPLETED


def test_xclbins_that_are_refused(
    emulated_cards: EmulatedCards, devices: list[Device], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Loading fails for a kernel that was not compiled, and while there are buffers of another xclbin."""
    absent = ComputeUnit(Kernel("absent", 9, ("data",), ("scale",)), "absent_1")
    path = tmp_path / "absent.xclbin"
    path.write_bytes(xclbin(Design(SMARTSSD.platform, (PROBE_DESIGN.compute_units[0], absent))))
    with pytest.raises(XrtError):
        devices[0].load(path)
    assert "the library of kernels has no absent" in capfd.readouterr().err
    devices[0].load(emulated_cards.build.probe_xclbin)  # only XRT has forgotten it
    buffer = devices[0].allocate(BYTES)
    with pytest.raises(XrtError):
        devices[0].load(emulated_cards.build.xclbin)
    assert "the card holds buffers of another xclbin" in capfd.readouterr().err
    buffer.free()


def test_runs_of_a_unit_wait_for_each_other(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """They do not wait for those of the other unit, nor do syncs. A run that completes late writes only then."""
    emulated_cards.inject("hang")
    first, waiting = probe.run(), probe.run()
    emulated_cards.wait_for("run-hung")
    other = probe.run(unit="probe:{probe_2}", data=probe.buffer(BYTES), parameter=probe.buffer(BYTES))
    assert other.wait() is State.COMPLETED
    probe.gradient.upload()
    probe.parameter.download()
    assert waiting.wait(1) is first.wait(5) is State.TIMEOUT and first.state() is State.RUNNING
    assert (floats(probe.data) == 1).all()
    emulated_cards.release()
    assert first.wait() is waiting.wait() is State.COMPLETED
    assert (floats(probe.data) == 5).all()
    order = [(event.name, int(event.fields[0])) for event in emulated_cards.events("run-begin", "run-end")]
    assert order.index(("run-end", 0)) < order.index(("run-begin", 1))


@pytest.mark.parametrize(("kind", "state"), [("error", State.ERROR), ("abort", State.ABORT)])
def test_failed_run_leaves_nothing_of_use(emulated_cards: EmulatedCards, probe: Probe, kind: str, state: State) -> None:
    """Only the chosen run fails, and it leaves poison; the runs before and after it complete."""
    emulated_cards.inject(kind, skipped=1)
    assert [probe.run().wait() for _ in range(2)] == [State.COMPLETED, state]
    assert (probe.data.map() == DEVICE_POISON).all()
    assert probe.run().wait() is State.COMPLETED and emulated_cards.counter("runs_failed") == 1


@pytest.mark.parametrize("setting", ["latency_us", "kernel_mib_per_s", "dma_mib_per_s"])
def test_slow_card_takes_longer_than_a_fast_one(
    emulated_cards: EmulatedCards, probes: list[Probe], setting: str
) -> None:
    """A slow card, which would take 16 seconds, is still at work when the other has done three times as much."""
    emulated_cards.set(setting, 16_000_000 if setting == "latency_us" else 1, card=0)
    kind = "to" if setting == "dma_mib_per_s" else "run"
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
    large, small = probes[0].buffer(1 << 24), probes[1].buffer(1 << 12)
    emulated_cards.reset()
    emulated_cards.set("channel_mib_per_s", 1)
    slow = Thread(target=large.upload)
    slow.start()
    emulated_cards.wait_for("turn", card=0)
    small.upload()
    assert not emulated_cards.events("to-end", card=0)
    emulated_cards.release(0)
    join(slow)
    turns = {
        card: [tuple(map(int, event.fields)) for event in emulated_cards.events("turn", card=card)] for card in (0, 1)
    }
    assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted([*turns[0], *turns[1]])))
    assert sum(end - begin for begin, end in turns[1]) == 1_000_000_000 * 4096 // (1 << 20)
