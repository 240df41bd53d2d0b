"""Tests what a caller of pyxrt has to know, with the probe kernel on an emulated card.

These tests say what pyxrt does, not what it should do: the pyxrt binding is built around it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.helpers.runif import RunIf
from tests.xrt.cards import EmulatedCards
from tests.xrt.probe import BEATS, BYTES, PROBE

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
        self.buffers = [pyxrt.bo(self.device, BYTES, pyxrt.bo.normal, 0) for _ in range(4)]
        for buffer, value in zip(self.buffers, (2, 1, 0, 0), strict=True):
            floats(buffer)[:] = value
            buffer.sync(pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, BYTES, 0)

    def run(self) -> Any:
        """Return a run with all its arguments that has not started."""
        gradient, data, parameter, status = self.buffers
        run = self.pyxrt.run(self.kernel)
        for index, argument in enumerate([gradient, data, data, parameter, status, 0, 0, BEATS, 0, 0, 0, HALF]):
            run.set_arg(index, argument)
        return run

    @property
    def parameter(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        self.buffers[2].sync(self.pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, BYTES, 0)
        return floats(self.buffers[2])


def floats(buffer: Any) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.frombuffer(buffer.map(), np.float32)


@pytest.fixture
def probe(pyxrt: ModuleType, emulated_cards: EmulatedCards) -> Iterator[PyxrtProbe]:
    made = PyxrtProbe(pyxrt, emulated_cards.build.probe_xclbin)
    yield made
    emulated_cards.reset()
    vars(made).clear()  # pytest keeps the probe for longer than the cards: its buffers are freed now


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
