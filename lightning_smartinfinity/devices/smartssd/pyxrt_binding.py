"""Calls XRT through pyxrt, using only calls common to all its versions since 2.11, with two exceptions.

- Cards are opened by their address, or by number with a pyxrt before 2.13.
- Kernels are opened in a ``hw_context`` of the registered xclbin. A pyxrt without contexts opens them by
  ``load_xclbin`` and ``kernel(device, uuid, ...)``, which XRT deprecated in 2026.

The other calls are ``kernel.group_id``, ``bo(device, ...)`` and ``bo(bo, ...)``, ``bo.map``, ``bo.sync`` with size and
offset, ``run(kernel)``, ``run.set_arg``, ``run.start`` and ``run.state``. The binding serves systems without XRT's C
library. Every call holds the interpreter's lock, so calls to several cards run one after the other. The binding works
around these faults of pyxrt:

- Scalars are C ints, and a float would be truncated: the caller passes the float's bits.
- ``kernel(...)`` silently drops arguments: each argument of a ``run`` is set by a separate call.
- ``run.wait(0)`` waits forever, and every wait holds the lock: the state is polled instead.
- A map does not keep its buffer alive: the binding holds both.
- A buffer does not keep its device open, and XRT may then confuse it with the next device: the binding holds the
  device, and the native core holds the binding as long as it holds any object from the binding.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_smartinfinity.devices.smartssd.discovery.cards import Card
from lightning_smartinfinity.devices.smartssd.discovery.xclbin import Xclbin
from lightning_smartinfinity.errors import DeviceError

__all__ = ["PyxrtBinding"]

_COMPLETED, _ERROR, _ABORT = 4, 5, 6
_ENDED = frozenset({_COMPLETED, _ERROR, _ABORT, 9, 10, 11})
_POLL_SECONDS = 50e-6
_LONGEST_POLL_SECONDS = 2e-3


class _Buffer:
    """A buffer object and the map of its memory, made on demand; neither outlives the other."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._map: memoryview | None = None

    @property
    def address(self) -> int:
        if self._map is None:
            self._map = self.handle.map()
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def _opened(pyxrt: Any, card: Card, num_cards: int) -> Any:
    if card.path is None:
        return pyxrt.device(card.number)
    try:
        return pyxrt.device(card.address)
    except TypeError:  # before 2.13, cards are opened by number only
        device = pyxrt.device(card.number)
    _require_address(pyxrt, device, card, num_cards)
    return device


def _require_address(pyxrt: Any, device: Any, card: Card, num_cards: int) -> None:
    """Check that XRT's number opened this card: another card would receive the state of this card's SSD.

    Raises:
        DeviceError: XRT opened another card, or pyxrt does not report which of several cards it opened.
    """
    try:
        address = str(device.get_info(pyxrt.xrt_info_device.bdf))
    except AttributeError:  # an older pyxrt does not report the address
        address = None
    if address is None and num_cards > 1:
        raise DeviceError(
            f"pyxrt cannot tell which of {num_cards} cards it has opened for the {card.label}.",
            "Use XRT's C library, SmartSSDConfig(binding='native'), or XRT 2.13 or later.",
        )
    if address is not None and address.lower() != card.address.lower():
        raise DeviceError(
            f"pyxrt has opened card {address} for the {card.label}: XRT numbers cards in another order.",
            "Use XRT's C library, SmartSSDConfig(binding='native'), or XRT 2.13 or later.",
        )


def _loaded(pyxrt: Any, device: Any, xclbin: Xclbin) -> Callable[[str], Any]:
    """Load the xclbin; return the function that opens one of its kernels by name."""
    try:
        if hasattr(pyxrt, "hw_context"):
            # Drivers without contexts, such as xocl, load the xclbin when it is registered.
            uuid = device.register_xclbin(pyxrt.xclbin(str(xclbin.path)))
            return partial(pyxrt.kernel, pyxrt.hw_context(device, uuid))
        uuid = device.load_xclbin(str(xclbin.path))
        return lambda name: pyxrt.kernel(device, uuid, name, pyxrt.kernel.shared)
    except RuntimeError as error:  # its message does not name the call that failed
        raise RuntimeError(f"pyxrt cannot load the xclbin: {error}") from error


class PyxrtBinding:
    """The calls through which the native core uses a card.

    Args:
        card: Card to open.
        xclbin: Xclbin to load.
        num_cards: Number of cards on this machine's PCI bus.

    Raises:
        DeviceError: pyxrt opened another card, or does not report which of several cards it opened.
        ImportError: pyxrt is not installed.
        RuntimeError: A call to XRT fails.
    """

    def __init__(self, card: Card, xclbin: Xclbin, *, num_cards: int) -> None:
        import pyxrt

        self._pyxrt = pyxrt
        self._device = _opened(pyxrt, card, num_cards)
        self._open_kernel = _loaded(pyxrt, self._device, xclbin)

    def kernel(self, name: str) -> Any:
        """Open one of the xclbin's kernels, shared with other processes."""
        return self._open_kernel(name)

    def group(self, kernel: Any, argument: int) -> int:
        """Return the memory bank that a kernel reaches through this argument."""
        return int(kernel.group_id(argument))

    def allocate(self, nbytes: int, p2p: bool, group: int) -> _Buffer:
        """Allocate a buffer in the card's memory."""
        flags = self._pyxrt.bo.p2p if p2p else self._pyxrt.bo.normal
        return _Buffer(self._pyxrt.bo(self._device, nbytes, flags, group))

    def part(self, buffer: _Buffer, nbytes: int, offset: int) -> _Buffer:
        """Return a part of a buffer as a separate buffer."""
        return _Buffer(self._pyxrt.bo(buffer.handle, nbytes, offset))

    def address(self, buffer: _Buffer) -> int:
        """Return the address of a buffer's map in host memory."""
        return buffer.address

    def sync(self, buffer: _Buffer, to_card: bool, nbytes: int, offset: int) -> None:
        """Copy between a buffer's map and the card's memory."""
        direction = self._pyxrt.xclBOSyncDirection
        way = direction.XCL_BO_SYNC_BO_TO_DEVICE if to_card else direction.XCL_BO_SYNC_BO_FROM_DEVICE
        buffer.handle.sync(way, nbytes, offset)

    def run(self, kernel: Any) -> Any:
        """Create a run of a kernel, without arguments yet."""
        return self._pyxrt.run(kernel)

    def set_scalar(self, run: Any, index: int, value: int) -> None:
        """Set a 32-bit argument, given as a signed int."""
        run.set_arg(index, value)

    def set_buffer(self, run: Any, index: int, buffer: _Buffer) -> None:
        """Set an argument that is a pointer."""
        run.set_arg(index, buffer.handle)

    def start(self, run: Any) -> None:
        """Start a run; return at once."""
        run.start()

    def wait(self, run: Any, timeout_ms: int) -> int:
        """Wait until the run has ended or ``timeout_ms`` milliseconds have passed; return the run's state."""
        end = time.monotonic() + timeout_ms / 1000
        pause = _POLL_SECONDS
        while (state := self.state(run)) not in _ENDED and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        return state

    def state(self, run: Any) -> int:
        """Return ERT's number of the state. pyxrt's enumeration lacks RUNNING, so compare numbers."""
        return int(run.state())
