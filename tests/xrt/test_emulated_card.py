"""Tests the emulated SmartSSD itself, through XRT's C API: memory, runs and guards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hls.description import SMARTSSD, ComputeUnit, Design, Kernel
from hls.xclbin import xclbin
from tests.helpers.runif import RunIf
from tests.xrt.api import Device, Flags, State, XrtError, opened
from tests.xrt.cards import EmulatedCards
from tests.xrt.probe import BEATS, BYTES, PROBE_DESIGN, Probe, floats

pytestmark = RunIf(xrt=True)

DEVICE_POISON, HOST_POISON = 0xA5, 0x5A


def test_run_computes_in_the_cards_memory(probe: Probe) -> None:
    """A P2P buffer needs no sync; other outputs appear in the host's memory by a sync."""
    assert probe.run().wait() is State.COMPLETED
    probe.parameter.download()
    assert (floats(probe.data) == 3).all()
    assert (floats(probe.parameter) == 1.5).all()


def test_part_of_a_buffer_is_a_buffer(probe: Probe) -> None:
    """A kernel runs on a part of a buffer, as for arrays that lie behind each other in a ring."""
    ring = probe.buffer(3 * BYTES, Flags.P2P)
    part = ring.part(BYTES, BYTES)
    floats(ring)[:] = 5
    assert part.address == ring.address + BYTES
    assert probe.run(data=part).wait() is State.COMPLETED
    assert (floats(ring).reshape(3, -1) == [[5], [7], [5]]).all()
    part.free()


def test_compute_units_flush_subnormals(probe: Probe) -> None:
    """A subnormal product of two normal numbers is zero on the card, as for its operators, but not on the host."""
    assert probe.run(last=0).wait() is State.COMPLETED
    probe.status.download()
    assert (floats(probe.status) == 0).all()
    assert np.float32(1e-30) * np.float32(1e-10) > 0


def test_other_banks_and_host_memory_are_refused(probe: Probe) -> None:
    """The card has one bank, and cannot reach the host's memory."""
    assert probe.device.group("probe:{probe_1}", 0) == 0
    with pytest.raises(XrtError):
        probe.device.allocate(BYTES, bank=1)
    with pytest.raises(XrtError):
        probe.device.allocate(BYTES, Flags.HOST_ONLY)


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


def test_missing_sync_to_the_card_shows(probe: Probe) -> None:
    """The kernel reads the card's memory, whatever the host's memory says."""
    forgotten = probe.buffer(BYTES)
    floats(forgotten)[:] = 2
    assert probe.run(gradient=forgotten).wait() is State.COMPLETED
    assert not (floats(probe.data) == 3).any()


def test_missing_sync_from_the_card_shows(probe: Probe) -> None:
    """An earlier result is gone from the host's memory as soon as the card has another."""
    probe.run().wait()
    probe.parameter.download()
    probe.run(last=BEATS // 2).wait()
    changed, same = np.split(probe.parameter.map(), 2)
    assert (changed == HOST_POISON).all()
    assert (same.view(np.float32) == 1.5).all()
    probe.parameter.download()
    assert (floats(probe.parameter).reshape(2, -1) == [[2.5], [1.5]]).all()


@pytest.mark.parametrize(("short", "pointer"), [("gradient", 0), ("data", 1), ("parameter", 3)])
def test_beat_past_its_buffer_is_an_error(
    emulated_cards: EmulatedCards, probe: Probe, short: str, pointer: int
) -> None:
    """A beat read or written past its buffer is an error that names the kernel's pointer, and the process goes on."""
    longer = {name: probe.buffer(2 * BYTES) for name in {"gradient", "data", "parameter"} - {short}}
    assert probe.run(last=BEATS, **longer).wait() is State.COMPLETED
    assert probe.run(last=BEATS + 1, **longer).wait() is State.ERROR
    assert f"pointer {pointer}" in _reason(emulated_cards) and "past its buffer" in _reason(emulated_cards)
    assert probe.run(last=BEATS, **longer).wait() is State.COMPLETED


def test_beat_past_a_buffer_that_ends_within_a_page_is_an_error(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """Status beats and short gradients are guarded, too."""
    short = probe.buffer(BYTES - 64)
    assert probe.run(parameter=short, last=BEATS - 1).wait() is State.COMPLETED
    short.download()
    assert (floats(short) == 1.5).all()
    assert probe.run(parameter=short, last=BEATS).wait() is State.ERROR
    assert "pointer 3" in _reason(emulated_cards)


def test_array_ends_where_the_next_one_begins(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """A kernel that runs into the next array of the same allocation ends in an error that names its pointer."""
    ring = probe.buffer(3 * BYTES, Flags.P2P)
    data, parameter = ring.part(BYTES, 0), ring.part(2 * BYTES, BYTES)
    gradient = probe.buffer(2 * BYTES)
    floats(ring)[:] = 1
    assert probe.run(gradient=gradient, data=data, parameter=parameter, last=BEATS + 1).wait() is State.ERROR
    assert "pointer 1" in _reason(emulated_cards)
    data.free()
    parameter.free()


def test_unaligned_pointer_is_an_error(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """Memory ports move whole beats, so an unaligned pointer is an error."""
    whole = probe.buffer(2 * BYTES)
    part = whole.part(BYTES, 32)
    assert probe.run(parameter=part).wait() is State.ERROR
    assert "not 64-byte aligned" in _reason(emulated_cards)
    part.free()


def test_pointer_to_freed_memory_is_an_error(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """XRT passes on any address, so the card has to find a pointer to freed memory."""
    buffer = probe.device.allocate(BYTES)
    run = probe.prepare(parameter=buffer)
    buffer.free()
    run.start()
    assert run.wait() is State.ERROR
    assert "lies in no buffer" in _reason(emulated_cards)


def test_an_xclbin_with_a_kernel_that_was_not_compiled_is_refused(
    emulated_cards: EmulatedCards, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Loading fails and names the missing kernel, even beside one that is there; the card keeps what it had loaded."""
    absent = ComputeUnit(Kernel("absent", 9, ("data",), ("scale",)), "absent_1")
    path = tmp_path / "absent.xclbin"
    path.write_bytes(xclbin(Design(SMARTSSD.platform, (PROBE_DESIGN.compute_units[0], absent))))
    with opened(0, emulated_cards.build.probe_xclbin) as device:
        with pytest.raises(XrtError):
            device.load(path)
        assert "the library of kernels has no absent" in capfd.readouterr().err
        device.load(emulated_cards.build.probe_xclbin)  # only XRT has forgotten it
        probe = Probe(device)
        assert probe.run().wait() is State.COMPLETED
        probe.free()


def test_another_xclbin_is_refused_while_there_are_buffers(
    emulated_cards: EmulatedCards, probe: Probe, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another xclbin would not know the buffers' addresses, so it is refused."""
    with pytest.raises(XrtError):
        probe.device.load(emulated_cards.build.xclbin)
    assert "the card holds buffers of another xclbin" in capfd.readouterr().err


def test_machine_has_as_many_cards_as_are_set(emulated_cards: EmulatedCards) -> None:
    """Opening one card more than are set fails."""
    with pytest.raises(XrtError):
        Device(2, emulated_cards.build.probe_xclbin)


def test_counters_tell_runs_syncs_and_bytes(emulated_cards: EmulatedCards, probe: Probe) -> None:
    """P2P traffic needs no syncs, and is not counted by the card."""
    emulated_cards.reset()
    probe.run().wait()
    probe.parameter.download(BYTES // 2, BYTES // 4)
    probe.data.upload()
    names = ("runs_begun", "runs_completed", "syncs_to", "bytes_to", "syncs_from", "bytes_from")
    assert [emulated_cards.counter(name) for name in names] == [1, 1, 0, 0, 1, BYTES // 2]
    assert emulated_cards.counter("card_bytes") == 3 * BYTES + 64
    assert emulated_cards.counter("num_buffers") == 4
    assert emulated_cards.counter("runs_begun", card=1) == 0


def _reason(cards: EmulatedCards) -> str:
    """Return why the last run failed, in the card's words."""
    return " ".join(cards.events("run-end")[-1].fields[3:])
