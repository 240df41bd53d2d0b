"""Tests what a caller of pyxrt has to know, with the probe kernel on an emulated card.

These tests say what pyxrt does, not what it should do: the pyxrt binding is built around it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hls import xclbin as xclbin_module
from hls.xclbin import Section, SectionKind, sections, xclbin
from tests.helpers.runif import RunIf
from tests.helpers.waiting import join
from tests.xrt.cards import EmulatedCards
from tests.xrt.probe import BEATS, BYTES, PROBE, PROBE_DESIGN

pytestmark = RunIf(xrt=True)

FIRST, LAST, SCALE = (
    next(index for index, argument in enumerate(PROBE.arguments) if argument.name == name)
    for name in ("first", "last", "scale")
)
NOT_ENDED = (1, 2, 3, 7)  # NEW, QUEUED, RUNNING, SUBMITTED
HALF = int(np.float32(0.5).view(np.int32))


class PyxrtProbe:
    """The probe kernel on card 0: ``data += gradient; parameter = data * scale``, by beats."""

    def __init__(self, pyxrt: ModuleType, path: Path) -> None:
        self.pyxrt = pyxrt
        self.device = pyxrt.device(0)
        uuid = self.device.load_xclbin(str(path))
        self.kernel = pyxrt.kernel(self.device, uuid, "probe:{probe_1}", pyxrt.kernel.shared)
        self.buffers = [self.buffer() for _ in range(4)]
        for buffer, value in zip(self.buffers, (2, 1, 0, 0), strict=True):
            floats(buffer)[:] = value
            self.upload(buffer)

    def buffer(self, nbytes: int = BYTES, bank: int = 0) -> Any:
        return self.pyxrt.bo(self.device, nbytes, self.pyxrt.bo.normal, bank)

    def upload(self, buffer: Any) -> None:
        buffer.sync(self.pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, buffer.size(), 0)

    def download(self, buffer: Any) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        buffer.sync(self.pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, buffer.size(), 0)
        return floats(buffer)

    def pointers(self) -> list[Any]:
        gradient, data, parameter, status = self.buffers
        return [gradient, data, data, parameter, status]

    def run(self) -> Any:
        """Return a run with all its arguments that has not started."""
        run = self.pyxrt.run(self.kernel)
        for index, argument in enumerate([*self.pointers(), 0, 0, BEATS, 0, 0, 0, HALF]):
            run.set_arg(index, argument)
        return run

    @property
    def parameter(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return self.download(self.buffers[2])


def floats(buffer: Any) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.frombuffer(buffer.map(), np.float32)


@pytest.fixture
def probe(pyxrt: ModuleType, emulated_cards: EmulatedCards) -> Iterator[PyxrtProbe]:
    made = PyxrtProbe(pyxrt, emulated_cards.build.probe_xclbin)
    yield made
    emulated_cards.reset()
    vars(made).clear()  # pytest keeps the probe for longer than the cards: its buffers are freed now


@pytest.fixture
def long_turns() -> Iterator[None]:
    """Let a thread that runs Python keep the interpreter's lock until it releases the lock itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("value", [0.5, np.float64(0.5), 2**31, -(2**31) - 1])
def test_a_float_or_a_word_beyond_int_is_refused(probe: PyxrtProbe, value: float) -> None:
    """Floats and words beyond a C int are refused; a word with its highest bit set has to be passed as negative.

    A numpy float is neither refused nor passed on: a run from beat 3.9 begins at beat 3.
    """
    run = probe.run()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        run.set_arg(SCALE, value)
    run.set_arg(FIRST, np.float32(3.9))
    run.start()
    assert run.wait(30_000) == probe.pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    beats = probe.parameter.reshape(BEATS, -1)
    assert (beats[:3] == 0).all() and (beats[3:] == 1.5).all()


def test_calling_a_kernel_drops_a_float(probe: PyxrtProbe) -> None:
    """A call with a float drops it and completes all the same, here with a scale of zero bits."""
    run = probe.kernel(*probe.pointers(), 0, 0, BEATS, 0, 0, 0, 0.5)
    assert run.wait(30_000) == probe.pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    assert (probe.parameter == 0).all()


def test_waits_and_states(probe: PyxrtProbe, emulated_cards: EmulatedCards) -> None:
    """After a timeout the run goes on, and its state has no name: an unknown state is one that has not ended.

    A timeout of zero is none.
    """
    states = probe.pyxrt.ert_cmd_state
    emulated_cards.inject("hang")
    run = probe.run()
    run.start()
    emulated_cards.wait_for("run-hung")
    assert [run.wait(1), run.wait(1)] == [states.ERT_CMD_STATE_TIMEOUT] * 2
    assert int(run.state()) in NOT_ENDED and states(3).name == "???"
    emulated_cards.release()
    assert run.wait(30_000) == states.ERT_CMD_STATE_COMPLETED
    emulated_cards.set("latency_us", 20_000)
    run = probe.run()
    run.start()
    assert run.wait(0) == states.ERT_CMD_STATE_COMPLETED


@pytest.mark.usefixtures("long_turns")
def test_wait_and_sync_let_no_other_thread_run(probe: PyxrtProbe, emulated_cards: EmulatedCards) -> None:
    """A wait lets not even the thread run that would end it, so it runs into its timeout; a sync stops all, too."""
    emulated_cards.inject("hang")
    run = probe.run()
    run.start()
    emulated_cards.wait_for("run-hung")
    with other_thread(emulated_cards.release) as done:
        assert run.wait(100) == probe.pyxrt.ert_cmd_state.ERT_CMD_STATE_TIMEOUT
        assert not done.is_set()
    assert run.wait(30_000) == probe.pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    buffer = probe.buffer(1 << 20)
    emulated_cards.set("dma_mib_per_s", 20)
    with other_thread(lambda: None) as done:
        probe.upload(buffer)
        assert not done.is_set()


def test_a_map_does_not_keep_its_buffer(probe: PyxrtProbe, emulated_cards: EmulatedCards, tmp_path: Path) -> None:
    """A buffer's memory is freed with the last reference to the buffer, even while a view exists: hold both.

    The view is memory that `os.preadv` fills in part.
    """
    path = tmp_path / "file"
    path.write_bytes(np.arange(1024, dtype=np.float32).tobytes())
    buffer = probe.pyxrt.bo(probe.device, 2 * 4096, probe.pyxrt.bo.p2p, 0)
    view, before = buffer.map(), emulated_cards.counter("num_buffers")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.preadv(descriptor, [view[4096:]], 0) == 4096
    finally:
        os.close(descriptor)
    assert (floats(buffer)[1024:] == np.arange(1024)).all()
    del buffer
    assert emulated_cards.counter("num_buffers") == before - 1
    assert len(view) == 2 * 4096


def test_a_buffer_in_another_bank_is_cloned(
    pyxrt: ModuleType, emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer in another bank is no error: the kernel gets a copy in its own bank and writes to that alone."""
    path = tmp_path / "two_banks.xclbin"
    monkeypatch.setattr(xclbin_module, "sections", sections_with_two_banks)
    path.write_bytes(xclbin(PROBE_DESIGN))
    probe = PyxrtProbe(pyxrt, path)
    elsewhere = probe.buffer(bank=1)
    floats(elsewhere)[:] = 7
    probe.upload(elsewhere)
    run = probe.run()
    run.set_arg(3, elsewhere)
    run.start()
    assert run.wait(30_000) == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    assert (probe.download(elsewhere) == 7).all()


def sections_with_two_banks(design: Any) -> list[Section]:
    """Return the sections with a second bank behind the first, which no kernel reaches."""
    parts = {part.kind: part.content for part in sections(design)}
    bank = parts[SectionKind.MEM_TOPOLOGY][8:]
    base = design.platform.bank.base + design.platform.bank.size_bytes
    second = bank[:16] + base.to_bytes(8, "little") + b"bank1".ljust(16, b"\0")
    parts[SectionKind.MEM_TOPOLOGY] = (2).to_bytes(8, "little") + bank + second
    return [Section(kind, content) for kind, content in parts.items()]


class other_thread:
    """Starts a thread that waits, releases it as the block begins, and tells whether it has run.

    With :func:`long_turns` it cannot run before the block releases the interpreter's lock.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._gate, self._done = work, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._gate:
            self._work()
            self._done.set()

    def __enter__(self) -> threading.Event:
        self._gate.acquire()
        self._thread.start()
        self._gate.release()
        return self._done

    def __exit__(self, *_: object) -> None:
        join(self._thread)
        assert self._done.is_set()
