"""CUDA devices of a process whose entries are copied to and from the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lightning_smartinfinity.activations.cuda.copies import DeviceCopies
from lightning_smartinfinity.activations.rates import Rates
from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.pipeline.parameters.cuda import link_to

__all__ = ["Devices"]


class Devices:
    """Copies for each device from which an entry was offloaded.

    Args:
        rates: Gets the times of copies.
        stop: Called with a failure, after which offloading stops.
    """

    def __init__(self, rates: Rates, *, stop: Callable[[CudaError], None]) -> None:
        self._rates, self._stop = rates, stop
        self._copies: dict[torch.device, DeviceCopies | None] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def copies_of(self, device: torch.device) -> DeviceCopies | None:
        """Return the copies of a device; None if its entries cannot be evicted."""
        if device not in self._copies:
            copies = None
            try:
                link = link_to(device)
                copies = None if link is None else DeviceCopies(link, self._rates)
            except CudaError as error:
                self._stop(error)
            self._copies[device] = copies  # not after an interrupt
        return self._copies[device]

    def reap(self) -> None:
        """Return memory to the pool whose copies have run."""
        for copies in self._all():
            try:
                copies.reap()
            except CudaError as error:
                self._stop(error)

    def names(self) -> list[torch.device]:
        """Return the devices whose entries can be evicted."""
        return [device for device, copies in self._copies.items() if copies is not None]

    def wait(self) -> None:
        """Wait until all work given to torch's current streams so far is done."""
        for copies in self._all():
            try:
                copies.wait_for_current()
            except CudaError as error:
                self._stop(error)

    def close(self) -> None:
        """Wait for all copies."""
        for copies in self._all():
            copies.close()

    def _all(self) -> Iterator[DeviceCopies]:
        return (copies for copies in self._copies.values() if copies is not None)
