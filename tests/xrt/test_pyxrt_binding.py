"""Cards give the same results through pyxrt as through the C library, and recover from failures alike."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from lightning_smartinfinity import DeviceError
from lightning_smartinfinity.devices.smartssd import self_test
from lightning_smartinfinity.devices.smartssd.discovery.cards import Card
from lightning_smartinfinity.devices.smartssd.discovery.p2p import P2P, P2PState
from lightning_smartinfinity.devices.smartssd.discovery.pci import PciPath
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from lightning_smartinfinity.devices.smartssd.pyxrt_binding import PyxrtBinding, _opened
from tests.helpers import card_runs
from tests.helpers.card_runs import OPTIMIZERS, beside_host
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Case
from tests.xrt.cards import EmulatedCards
from tests.xrt.long_run import DTYPES
from tests.xrt.pyxrt import current, expected, signatures
from tests.xrt.test_device_failures import (
    test_close_with_a_hung_run,
    test_no_such_card_kernel_or_file,
    test_too_little_memory,
)

__all__ = [
    "test_close_with_a_hung_run",
    "test_no_such_card_kernel_or_file",
    "test_too_little_memory",
]

pytestmark = [RunIf(xrt=True), pytest.mark.filterwarnings("error:.* use hw_context:DeprecationWarning")]


@pytest.fixture(autouse=True)
def _through_pyxrt(pyxrt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open all cards through Python."""
    monkeypatch.setattr(card_runs, "setup_of", partial(card_runs.setup_of, binding="pyxrt"))


@pytest.fixture
def current_pyxrt(pyxrt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let ``import pyxrt`` find the form of XRT's master, whose deprecated calls fail a test."""
    module = current(pyxrt)
    monkeypatch.setitem(sys.modules, "pyxrt", module)
    return module


@pytest.mark.parametrize(
    ("form", "optimizer"), [("pyxrt", optimizer) for optimizer in OPTIMIZERS] + [("current_pyxrt", "adamw")]
)
def test_same_as_host(
    tmp_path: Path, emulated_cards: EmulatedCards, request: pytest.FixtureRequest, form: str, optimizer: str
) -> None:
    """Steps through pyxrt give the host's bits: floats travel as bits, and buffers live as long as their maps.

    Pyxrt starts every run of a kernel. One fails, and the host takes over.
    """
    module = request.getfixturevalue(form)
    case = Case(dtype=DTYPES[[*OPTIMIZERS].index(optimizer) % 3], num_devices=2, **OPTIMIZERS[optimizer])
    with (
        mock.patch.object(PyxrtBinding, "start", autospec=True, side_effect=PyxrtBinding.start) as start,
        beside_host(tmp_path, case, emulated_cards.build.xclbin) as runs,
    ):
        emulated_cards.inject("error", card=1, skipped=2)
        for each in runs:
            each.steps(range(3))
        assert sum(emulated_cards.counter("runs_failed", card) for card in range(2)) == 1
        begun = [emulated_cards.counter("runs_begun", card) for card in range(2)]
        assert all(begun) and start.call_count == sum(begun)
        assert all(isinstance(call.args[1], module.run) for call in start.call_args_list)
        assert "XRT by pyxrt" in runs[0].device.description


@pytest.mark.usefixtures("current_pyxrt")
def test_self_test(tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound cards pass the self-test. Without pyxrt it is an error that names the module."""
    setup = card_runs.setup_of(2, emulated_cards.build.xclbin)
    self_test(setup, [tmp_path, tmp_path], KERNELS)
    assert [emulated_cards.counter("runs_completed", card) for card in range(2)] == [9 * len(KERNELS)] * 2
    monkeypatch.setitem(sys.modules, "pyxrt", None)
    with pytest.raises(DeviceError, match="pyxrt"):
        self_test(setup, [tmp_path, tmp_path], KERNELS)


REAL_CARD = Card(
    1, PciPath(("pci0000:3a", "0000:3a:00.0", "0000:3d:00.1")), None, None, P2P(P2PState.UNKNOWN, None, None)
)


class OldPyxrt:
    """A pyxrt before 2.13, which opens cards by number alone and tells this address of them, if any."""

    def __init__(self, address: str | None) -> None:
        if address is not None:
            self.xrt_info_device = SimpleNamespace(bdf=address)

    def device(self, which: object) -> SimpleNamespace:
        if isinstance(which, str):
            raise TypeError("incompatible constructor arguments")
        return SimpleNamespace(number=which, get_info=str)


def test_real_cards_open_by_address() -> None:
    """A card is opened by address, or, with a pyxrt before 2.13, by number, after which its address is checked.

    Without addresses the only card is opened, but one of several is refused, as it might be any.
    """
    assert _opened(SimpleNamespace(device=lambda which: which), REAL_CARD, num_cards=2) == REAL_CARD.address
    for address, num_cards in ((REAL_CARD.address, 2), (None, 1)):
        assert _opened(OldPyxrt(address), REAL_CARD, num_cards=num_cards).number == REAL_CARD.number
    with pytest.raises(DeviceError, match=r"opened card 0000:5e:00\.1 for the card 0000:3d:00\.1"):
        _opened(OldPyxrt("0000:5e:00.1"), REAL_CARD, num_cards=2)
    with pytest.raises(DeviceError, match=r"which of 2 cards.*binding='native'"):
        _opened(OldPyxrt(None), REAL_CARD, num_cards=2)


# ---- pyxrt, the system's or ours, has the names, overloads and enum values of XRT 2.13, and its traps


FIRST, HALF = 6, int(np.float32(0.5).view(np.int32))  # the probe kernel's first beat; a scale


def test_signatures(pyxrt: ModuleType) -> None:
    """Overloads agree in types, order and number of arguments, and enumerators in names and values.

    Nothing is newer than 2.13, because a test could come to rely on it.
    """
    assert signatures(pyxrt) == expected()


def test_a_float_or_a_word_beyond_int_is_refused(pyxrt: ModuleType, emulated_cards: EmulatedCards) -> None:
    """Floats and words beyond a C int are refused; a word with its highest bit set has to be passed as negative.

    A numpy float is taken, and truncated: a run from beat 3.9 begins at beat 3.
    """
    device = pyxrt.device(0)
    uuid = device.load_xclbin(str(emulated_cards.build.probe_xclbin))
    run = pyxrt.run(pyxrt.kernel(device, uuid, "probe:{probe_1}", pyxrt.kernel.shared))
    for value in (0.5, np.float64(0.5), 2**31, -(2**31) - 1):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            run.set_arg(FIRST, value)
    ones, sums = (pyxrt.bo(device, 4096, pyxrt.bo.normal, 0) for _ in range(2))
    for buffer, number in ((ones, 1), (sums, 0)):
        np.frombuffer(buffer.map(), np.float32)[:] = number
        buffer.sync(pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE, 4096, 0)
    for index, value in enumerate([ones, ones, sums, sums, ones, -(2**31), np.float32(3.9), 8, 0, 0, 0, HALF]):
        run.set_arg(index, value)
    run.start()
    assert run.wait(30_000) == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    sums.sync(pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, 4096, 0)
    beats = np.array(sums.map()).view(np.float32).reshape(64, 16)[:, 0].tolist()
    del run, buffer, ones, sums  # a failed test keeps its frame, and the cards are reset only without buffers
    assert beats == 3 * [0] + 5 * [1] + 56 * [0]


def test_a_map_does_not_keep_its_buffer(pyxrt: ModuleType, emulated_cards: EmulatedCards, tmp_path: Path) -> None:
    """A buffer's memory is freed with the last reference to the buffer, even while a view exists: hold both.

    The view is memory that `os.preadv` fills in part.
    """
    path = tmp_path / "file"
    path.write_bytes(np.arange(1024, dtype=np.float32).tobytes())
    device = pyxrt.device(0)
    device.load_xclbin(str(emulated_cards.build.xclbin))
    buffer = pyxrt.bo(device, 2 * 4096, pyxrt.bo.p2p, 0)
    view, before = buffer.map(), emulated_cards.counter("num_buffers")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.preadv(descriptor, [view[4096:]], 0) == 4096
    finally:
        os.close(descriptor)
    assert (np.frombuffer(view, np.float32)[1024:] == np.arange(1024)).all()
    del buffer
    assert emulated_cards.counter("num_buffers") == before - 1 and len(view) == 2 * 4096
