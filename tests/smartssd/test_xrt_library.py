"""The calls to XRT's C API and the reports of their failures, on a fake library without XRT or a card.

The core opens it in place of libxrt_coreutil; fake_xrt.cpp has it.
"""

from __future__ import annotations

import ctypes
import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_smartinfinity import DeviceError
from lightning_smartinfinity.devices.smartssd import CardSetup
from lightning_smartinfinity.devices.smartssd.discovery import cards as discovered
from lightning_smartinfinity.devices.smartssd.discovery.pci import PciPath
from lightning_smartinfinity.devices.smartssd.opening import card_errors, open_card
from tests.helpers.card_runs import setup_of
from tests.helpers.native_testing import sync_to_card
from tests.native.builds import built_once


def without(library: Path, entry: str, folder: Path) -> Path:
    """Return a copy of the library in which an entry point is renamed."""
    content, name = library.read_bytes(), b"\0" + entry.encode() + b"\0"
    assert name in content
    lacking = folder / library.name
    lacking.write_bytes(content.replace(name, name.replace(b"xrt", b"old")))
    return lacking


class FakeXrt:
    """The controls and observations of the fake library. A new object removes failures and empties the log."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._calls = calls = ctypes.CDLL(str(library))
        calls.fake_log.restype = ctypes.c_char_p
        calls.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        calls.fake_reset()

    def fail(self, call: str, *, result: int = -1, errno: int = 0) -> None:
        """Make calls fail from now on. Calls that create something return null, the others this result."""
        self._calls.fake_fail(call.encode(), result, errno)

    def log(self) -> list[str]:
        """Return the calls since then with their arguments."""
        return str(self._calls.fake_log().decode()).splitlines()


BDF = "0000:42:00.1"
ENTRIES = (
    *("xrtDeviceOpen", "xrtDeviceOpenByBDF", "xrtDeviceClose", "xrtDeviceLoadXclbinFile", "xrtDeviceGetXclbinUUID"),
    *("xrtPLKernelOpen", "xrtKernelClose", "xrtKernelArgGroupId"),
    *("xrtBOAlloc", "xrtBOSubAlloc", "xrtBOFree", "xrtBOMap", "xrtBOSync"),
    *("xrtRunOpen", "xrtRunClose", "xrtRunSetArg", "xrtRunStart", "xrtRunWaitFor", "xrtRunState"),
)


@pytest.fixture
def xrt() -> FakeXrt:
    """The fake library, which is compiled if there is none yet."""
    return FakeXrt(built_once("libfake_xrt.so", Path(__file__).with_name("fake_xrt.cpp")))


def card_of(xrt: FakeXrt, *steps: str, number: int = 0) -> tuple[CardSetup, discovered.Card]:
    """Return a setup with the fake library, and a card with a path on the PCI bus, or an emulated one."""
    setup = replace(setup_of(1, Path("a/kernels.xclbin")), library=str(xrt.library))
    return setup, setup.cards[0]._replace(path=PciPath(steps) if steps else None, number=number)


@pytest.mark.parametrize(
    ("steps", "call"), [(("pci0000:3a", "0000:3b:00.0", BDF), f"xrtDeviceOpenByBDF {BDF}"), ((), "xrtDeviceOpen 5")]
)
def test_a_card_by_address_or_number(xrt: FakeXrt, steps: tuple[str, ...], call: str) -> None:
    """A real card is opened by its address, because XRT may number cards in another order. Emulated cards have numbers.

    It loads its kernels, and closes with its last user.
    """
    open_card(*card_of(xrt, *steps, number=5)).close()
    loaded = ["xrtDeviceLoadXclbinFile a/kernels.xclbin", "xrtDeviceGetXclbinUUID"]
    assert xrt.log() == [call, *loaded, "xrtDeviceClose"]


@pytest.mark.parametrize(
    ("call", "failure", "told", "remedy"),
    [
        (
            "xrtDeviceOpenByBDF",
            {"errno": errno.EPERM},
            rf"\({BDF}\) failed: Operation not permitted",
            "Check XILINX_XRT",
        ),
        # The reason is errno or the returned value of either sign, and XRT may give none.
        ("xrtDeviceLoadXclbinFile", {}, r"\(a/kernels\.xclbin\) failed\.", "whether the card is still there"),
        (
            "xrtDeviceLoadXclbinFile",
            {"errno": errno.EBUSY},
            r".* Device or resource busy \(errno 16\)",
            "close what holds",
        ),
        ("xrtDeviceLoadXclbinFile", {"result": -errno.ENODEV}, r".* No such device \(errno 19\)", "The card is gone"),
        ("xrtDeviceLoadXclbinFile", {"result": errno.EINVAL}, r".* Invalid argument \(errno 22\)", "close what holds"),
        ("xrtPLKernelOpen", {"errno": errno.ENOENT}, r"\(adamw_update\) failed: No such file", "make -C hls xclbin"),
        ("xrtKernelArgGroupId", {"errno": errno.EINVAL}, " of argument 3 failed: Invalid argument", "the kernel log"),
        (
            "xrtBOAlloc",
            {"errno": errno.ENOMEM},
            " of 4096 bytes, peer to peer, failed: Cannot allocate",
            "tasklet_bytes",
        ),
        ("xrtBOSync", {"errno": errno.EIO}, " of 64 bytes to the card failed: Input/output error", "selftest"),
        *(
            (call, {"errno": errno.ENODEV}, "", "The card is gone. .*reset it")
            for call in ("xrtPLKernelOpen", "xrtBOAlloc", "xrtBOSync")
        ),
    ],
)
def test_which_call_failed(xrt: FakeXrt, call: str, failure: dict[str, int], told: str, remedy: str) -> None:
    """The error names the call, its argument and the reason in words. What was opened is closed, and nothing else.

    The reason decides the remedy: a card that is gone needs no other xclbin or smaller tasklets.
    """
    setup, card = card_of(xrt, "pci0000:3a", BDF)
    xrt.fail(call, **failure)

    def use() -> None:
        with card_errors(card):
            opened = open_card(setup, card)
            sync_to_card(opened.allocate(4096, group=opened.group("adamw_update", 3), p2p=True), 64)

    with pytest.raises(DeviceError) as failed:
        use()
    assert re.match(f"The card {BDF}: {call}{told}", failed.value.problem) and re.search(remedy, failed.value.remedy)
    if "Device" in call:
        assert ("xrtDeviceClose" in xrt.log()) == (call == "xrtDeviceLoadXclbinFile")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_library_that_lacks_an_entry_point(xrt: FakeXrt, tmp_path: Path, entry: str) -> None:
    """An entry point missing in another release of XRT is named before anything is opened, with a remedy of its own."""
    lacking = FakeXrt(without(xrt.library, entry, tmp_path))
    with pytest.raises(DeviceError, match=rf"XRT's library has no {entry}\W.*Install XRT"):
        open_card(*card_of(lacking))
    assert lacking.log() == []
