"""Copies a buffer to a card by XRT's C library, as far as the speed of syncs is measured by it.

Calls let other threads run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from tests.helpers.native_testing import sync_to_card


class Device:
    """One card with an xclbin."""

    def __init__(self, index: int, xclbin: Path) -> None:
        self._card = native.Card.open(index, xclbin=str(xclbin))

    def allocate(self, size: int) -> Buffer:
        return Buffer(self._card.allocate(size, group=self._card.group(KERNELS[0].name, 0)))

    def close(self) -> None:
        self._card.close()


class Buffer:
    """A buffer, which keeps its card open."""

    def __init__(self, buffer: native.CardBuffer) -> None:
        self._buffer = buffer

    def upload(self) -> None:
        sync_to_card(self._buffer, self._buffer.nbytes)


@contextmanager
def opened(index: int, xclbin: Path) -> Iterator[Device]:
    """Open a card, and close it after the block."""
    with closing(Device(index, xclbin)) as device:
        yield device
