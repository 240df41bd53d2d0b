"""Opens cards through XRT and allocates their memory; failures are raised as the package's own errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.discovery.card_setup import CardSetup
from lightning_smartinfinity.devices.smartssd.discovery.cards import Card, cards_of
from lightning_smartinfinity.devices.smartssd.discovery.system import System
from lightning_smartinfinity.devices.smartssd.ring import CardRing, ring_within, share_of_memory
from lightning_smartinfinity.devices.smartssd.unreturned import require_returned
from lightning_smartinfinity.errors import DeviceError, SmartInfinityError

__all__ = ["SELF_TEST_ADVICE", "card_errors", "memory_group", "open_card", "remedy_for", "require_memory"]

SELF_TEST_ADVICE = " Check the card with `smart-infinity selftest`."
"""Last sentence of a remedy; the command itself omits it."""

_SMALLER = "Use smaller tasklets or fewer of them at a time: TransferConfig(tasklet_bytes=..., num_buffers=...)."
_GONE = (
    "The card is gone. Look into the kernel log and at `xbutil examine`, and reset it or restart the machine. Or use"
    f" update_device='host'.{SELF_TEST_ADVICE}"
)
_OLD_XRT = "Install XRT 2.13 or later: the loaded library is of another release, or another library of that name."
_UNFOUND = f"Check XILINX_XRT, the driver xocl and the card: `xbutil examine`.{SELF_TEST_ADVICE}"
_ANOTHER = (
    "Look at `xbutil examine` whether the card is still there. If it is, close what holds it with another xclbin, and"
    " check that this one was built for the card's shell."
)
_REBUILD = (
    "Build the xclbin from the hls/ folder of a checkout or source distribution of this version: make -C hls xclbin."
)
# The first entry whose words are in the message applies: errno's texts come before names of calls, because they are
# more specific.
_REMEDIES = {
    "XRT's library has no": _OLD_XRT,
    "xrtDeviceOpen": _UNFOUND,
    "open device": _UNFOUND,
    os.strerror(errno.ENODEV): _GONE,
    "peer to peer": (
        f"If P2P is off, run `xbutil configure --device ADDRESS --p2p enable` as root and reboot warm. Else: {_SMALLER}"
    ),
    "too small": _SMALLER,
    "xrtBOAlloc": _SMALLER,
    "bad_alloc": _SMALLER,
    "bank": f"{_REBUILD} All its kernels' ports are in the card's one bank.",
    "Xclbin": _ANOTHER,
    "load the xclbin": _ANOTHER,
    "interface version": _REBUILD,
    "xrtPLKernelOpen": _REBUILD,
    "kernel failed": _REBUILD,
}
_OTHER_REMEDY = f"Look into the kernel log, or use update_device='host'.{SELF_TEST_ADVICE}"


def open_card(setup: CardSetup, card: Card) -> native.Card:
    """Open a card, and load the xclbin unless it is already loaded.

    Raises:
        DeviceError: XRT fails, or a call that this process abandoned has not yet returned from the card.
    """
    require_returned(card)
    with card_errors(card):
        if setup.binding == "pyxrt":
            from lightning_smartinfinity.devices.smartssd.pyxrt_binding import PyxrtBinding

            return native.Card(PyxrtBinding(card, setup.xclbin, num_cards=len(cards_of(System()))))
        device: int | str = card.number if card.path is None else card.address
        assert setup.library is not None
        return native.Card.open(device, xclbin=str(setup.xclbin.path), library=setup.library)


def memory_group(setup: CardSetup, opened: native.Card) -> int:
    """Return the group of the card's memory bank to which the ports of all kernels are connected.

    Raises:
        DeviceError: The xclbin has no kernel.
    """
    if not setup.xclbin.kernels:
        raise DeviceError(f"The xclbin {setup.xclbin.path} has no kernels.", _REBUILD)
    return opened.group(setup.xclbin.kernels[0], 0)


def require_memory(setup: CardSetup, card: Card, wanted: CardRing, *, extent_bytes: int) -> None:
    """Check that a ring fits into a card's memory, by allocating and freeing it.

    Args:
        setup: The setup, which describes how cards are opened and how many processes share one.
        card: Card to check.
        wanted: Ring to allocate; buffers that exceed this process's share are left out.
        extent_bytes: Size of the largest extent, as for ``CardRing.parts``.

    Raises:
        DeviceError: There is not enough memory, or the card is shared and the xclbin does not state its memory.
    """
    ring, share = ring_within(setup, wanted, extent_bytes=extent_bytes), share_of_memory(setup)
    if share is not None and ring.nbytes(extent_bytes) > share:
        raise DeviceError(
            f"The memory of the {card.label} is too small: {ring.num_buffers} ring buffers take"
            f" {ring.nbytes(extent_bytes)} bytes, and each of {setup.sharers} processes may take {share}.",
            _SMALLER,
        )
    with card_errors(card):
        opened = open_card(setup, card)
        buffers: list[native.CardBuffer] = []
        try:
            group = memory_group(setup, opened)
            for _ in range(ring.num_buffers):
                state, *others = ring.parts(extent_bytes)
                buffers.append(opened.allocate(state, group=group, p2p=True))
                buffers += [opened.allocate(nbytes, group=group) for nbytes in others]
        finally:
            buffers.clear()
            opened.close()


@contextmanager
def card_errors(card: Card) -> Iterator[None]:
    """Convert a card's errors from the native core and pyxrt to DeviceError."""
    try:
        yield
    except SmartInfinityError:
        raise
    except (RuntimeError, ImportError, MemoryError) as error:  # native.CardError is a RuntimeError
        raise DeviceError(f"The {card.label}: {error or 'no memory'}.", remedy_for(str(error))) from error


def remedy_for(message: str) -> str:
    """Return advice for a failed call to a card."""
    return next((remedy for word, remedy in _REMEDIES.items() if word in message), _OTHER_REMEDY)
