"""The calls to XRT's C API and the reports of their failures, on a fake library without XRT or a card."""

from __future__ import annotations

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
from lightning_smartinfinity.native import Card, CardError
from tests.helpers.card_runs import setup_of
from tests.helpers.native_testing import sync_from_card, sync_to_card
from tests.smartssd.fake_xrt import FakeXrt, build, without

BDF = "0000:42:00.1"
ENTRIES = (
    *("xrtDeviceOpen", "xrtDeviceOpenByBDF", "xrtDeviceClose", "xrtDeviceLoadXclbinFile", "xrtDeviceGetXclbinUUID"),
    *("xrtPLKernelOpen", "xrtKernelClose", "xrtKernelArgGroupId"),
    *("xrtBOAlloc", "xrtBOSubAlloc", "xrtBOFree", "xrtBOMap", "xrtBOSync"),
    *("xrtRunOpen", "xrtRunClose", "xrtRunSetArg", "xrtRunStart", "xrtRunWaitFor", "xrtRunState"),
)


@pytest.fixture(scope="module")
def library() -> FakeXrt:
    return FakeXrt(build())


@pytest.fixture
def xrt(library: FakeXrt) -> FakeXrt:
    library.reset()
    return library


def opened(xrt: FakeXrt) -> Card:
    return Card.open(BDF, xclbin="a/kernels.xclbin", library=str(xrt.library))


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


def test_memory_and_kernels(xrt: FakeXrt) -> None:
    """Kernels, groups, P2P flags and the direction of a sync reach XRT as asked for."""
    card = opened(xrt)
    xrt.reset()
    group = card.group("adamw_update", 4)
    normal, direct = card.allocate(8192, group=group), card.allocate(4096, group=7, p2p=True)
    sync_to_card(normal, 4096, 64)
    sync_from_card(normal, 128)
    card.close()
    del normal, direct
    lines = xrt.log()
    assert lines[:3] == ["xrtPLKernelOpen adamw_update", "xrtKernelArgGroupId 4", "xrtKernelClose"]
    # XRT_BO_FLAGS_P2P is bit 30.
    allocated = ["xrtBOAlloc 8192 flags 0 group 104", f"xrtBOAlloc 4096 flags {1 << 30} group 7"]
    assert lines[3:7] == [allocated[0], "xrtBOMap", allocated[1], "xrtBOMap"]
    assert lines[7:] == ["xrtBOSync 0 4096 at 64", "xrtBOSync 1 128 at 0", "xrtBOFree", "xrtBOFree", "xrtDeviceClose"]


@pytest.mark.parametrize(
    ("result", "error", "told"),
    [
        (-1, errno.EBUSY, r": Device or resource busy \(errno 16\)"),
        (-errno.ENODEV, 0, r": No such device \(errno 19\)"),
        (errno.EINVAL, 0, r": Invalid argument \(errno 22\)"),
        (-1, 0, ""),
    ],
)
def test_why_a_call_failed(xrt: FakeXrt, result: int, error: int, told: str) -> None:
    """The reason is taken from errno or the returned value of either sign. XRT may give none."""
    xrt.fail("xrtDeviceLoadXclbinFile", result=result, errno=error)
    with pytest.raises(CardError, match=rf"^xrtDeviceLoadXclbinFile\(a/kernels\.xclbin\) failed{told}$"):
        opened(xrt)
    assert xrt.log()[-1] == "xrtDeviceClose"


def test_which_call_failed(xrt: FakeXrt) -> None:
    """The error names the call, its argument and errno in words. What was opened before is closed."""
    xrt.fail("xrtDeviceOpenByBDF", errno=errno.EPERM)
    with pytest.raises(CardError, match=rf"^xrtDeviceOpenByBDF\({BDF}\) failed: Operation not permitted \(errno 1\)$"):
        opened(xrt)
    assert "xrtDeviceClose" not in xrt.log()
    xrt.reset()
    card = opened(xrt)
    buffer = card.allocate(4096, group=0)
    for call, error in (("xrtPLKernelOpen", errno.ENOENT), ("xrtBOAlloc", errno.ENOMEM), ("xrtBOSync", errno.EIO)):
        xrt.fail(call, errno=error)
    with pytest.raises(CardError, match=r"^xrtPLKernelOpen\(sgd_update\) failed: No such file or directory"):
        card.group("sgd_update", 0)
    with pytest.raises(CardError, match=r"^xrtBOAlloc of 8192 bytes, peer to peer, failed: Cannot allocate memory"):
        card.allocate(8192, group=0, p2p=True)
    with pytest.raises(CardError, match=r"^xrtBOSync of 64 bytes to the card failed: Input/output error"):
        sync_to_card(buffer, 64)
    xrt.reset()
    xrt.fail("xrtKernelArgGroupId", result=-errno.EINVAL)
    with pytest.raises(CardError, match=r"^xrtKernelArgGroupId of argument 3 failed"):
        card.group("sgd_update", 3)


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        ("xrtDeviceOpenByBDF", errno.ENODEV, "Check XILINX_XRT, the driver xocl and the card"),
        ("xrtDeviceLoadXclbinFile", errno.EBUSY, "close what holds it with another xclbin"),
        ("xrtDeviceLoadXclbinFile", 0, "whether the card is still there"),
        ("xrtPLKernelOpen", errno.ENOENT, "make -C hls xclbin"),
        ("xrtBOAlloc", errno.ENOMEM, r"smaller tasklets.*TransferConfig\(tasklet_bytes"),
        ("xrtBOSync", errno.EIO, "smart-infinity selftest"),
        *(
            (call, errno.ENODEV, "The card is gone. .*reset it")
            for call in ("xrtDeviceLoadXclbinFile", "xrtPLKernelOpen", "xrtBOAlloc", "xrtBOSync")
        ),
    ],
)
def test_remedies(xrt: FakeXrt, call: str, error: int, remedy: str) -> None:
    """A reason in errno decides the remedy: a card that is gone needs no other xclbin or smaller tasklets."""
    setup, card = card_of(xrt, "pci0000:3a", BDF)
    xrt.fail(call, errno=error)

    def use() -> None:
        with card_errors(card):
            opened = open_card(setup, card)
            sync_to_card(opened.allocate(4096, group=opened.group("adamw_update", 0)), 64)

    with pytest.raises(DeviceError) as failed:
        use()
    assert failed.value.problem.startswith(f"The card {BDF}: {call}")
    assert re.search(remedy, failed.value.remedy)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_library_that_lacks_an_entry_point(library: FakeXrt, tmp_path: Path, entry: str) -> None:
    """An entry point missing in another release of XRT is named before anything is opened, with a remedy of its own."""
    lacking = FakeXrt(without(library.library, entry, tmp_path))
    with pytest.raises(DeviceError, match=rf"XRT's library has no {entry}\W.*Install XRT"):
        open_card(*card_of(lacking))
    assert lacking.log() == []
