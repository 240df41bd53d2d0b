"""Submits tasklets to a device and waits for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.pipeline.layout.batches import Link, Memory, Piece
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout

__all__ = ["Assignment", "BatchMaker", "DirectSubmission", "Direction", "PartMaker", "Submission"]

BatchMaker = Callable[[Memory, Sequence[int]], Iterable[native.Batch]]
"""Makes the batch of some tasklets whose parameters are in this memory; yields it in parts, each made on demand."""

PartMaker = Callable[[Sequence[int]], Iterable[native.Batch]]
"""Makes the batch of some tasklets; yields it in parts, each made on demand."""


class Direction(Enum):
    """The direction in which an assignment copies parameters."""

    TO_PARTITION = auto()
    FROM_PARTITION = auto()


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Work on tasklets and their parameters.

    Args:
        device: The device that does the work, open and free.
        layout: The partition's layout.
        make_batch: Makes the batch of some of the tasklets. Another thread may call it.
        tasklets: Indices of the tasklets, in the order in which they start.
        pieces: Returns the pieces of these tasklets, in partition order. Parameters of pieces with a negative key do
            not change. Another thread may call it.
        direction: The direction in which parameters are copied.
    """

    device: StorageDevice
    layout: PartitionLayout
    make_batch: BatchMaker
    tasklets: Sequence[int]
    pieces: Callable[[], Sequence[Piece]]
    direction: Direction = Direction.TO_PARTITION


class Submission(ABC):
    """Tasklets in progress on the device. The order of calls is ``start``, ``wait``, then ``finish`` or ``stop``."""

    @abstractmethod
    def start(self) -> None:
        """Start the work and return at once."""

    @abstractmethod
    def wait(self, tasklets: Sequence[int]) -> None:
        """Wait until the parameters of the submitted ones among these tasklets are in the partition.

        Raises:
            StorageError: The work failed; only :meth:`stop` may follow.
            CudaError: Copying parameters from or to a CUDA device failed; only :meth:`stop` may follow.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all work is done and the device is free. Raises as :meth:`wait`."""

    @abstractmethod
    def stop(self) -> None:
        """Start no more work and wait until the device is free, even if work is left. Never raises these errors."""

    @abstractmethod
    def extend(self, tasklets: Sequence[int]) -> None:
        """Start more tasklets, after the present ones, and return at once."""

    @abstractmethod
    def prefer(self, tasklets: Sequence[int]) -> None:
        """Move these tasklets, in this order, before all others that have not started."""


class DirectSubmission(Submission):
    """Submits all tasklets as one batch, directly from and to memory.

    Args:
        device: The device, open and free.
        make_parts: Makes the batch. Its first part is submitted; the others are added while the device works.
        tasklets: Indices of the tasklets, in the parts' order.
        link: Link to the user of the CUDA device that holds the parameters; None means host memory.
    """

    def __init__(
        self, device: StorageDevice, make_parts: PartMaker, tasklets: Sequence[int], *, link: Link | None = None
    ) -> None:
        self._device = device
        self._make_parts = make_parts
        self._parts = make_parts(tasklets)
        self._link = link
        self._positions = {tasklet: position for position, tasklet in enumerate(tasklets)}
        self._active = False

    def extend(self, tasklets: Sequence[int]) -> None:
        parts = self._make_parts(tasklets)
        first = len(self._positions)
        self._positions.update((tasklet, first + number) for number, tasklet in enumerate(tasklets))
        self._send(parts)

    def prefer(self, tasklets: Sequence[int]) -> None:
        self._device.prefer([self._positions[tasklet] for tasklet in tasklets])

    def start(self) -> None:
        if self._positions:
            self._send(self._parts)

    def _send(self, parts: Iterable[native.Batch]) -> None:
        for part in parts:
            if self._active:
                self._device.extend(part)
                continue
            # Set first, so that stop() ends the work after an interrupt in submit().
            self._active = True
            if self._link is not None:
                self._link.take()
            self._device.submit(part)
            if self._link is not None:
                self._link.warn_of_unregistered()

    def wait(self, tasklets: Sequence[int]) -> None:
        positions = [self._positions[tasklet] for tasklet in tasklets if tasklet in self._positions]
        if self._active and positions:
            self._device.wait(positions)
            if self._link is not None:
                self._link.give()

    def finish(self) -> None:
        if self._active:
            try:
                self._device.finish()
            except SmartInfinityError:
                self._active = False
                raise
            # After an interrupt this stays True: work is still in progress on the device.
            self._active = False

    def stop(self) -> None:
        if self._active:
            self._device.stop()
            self._active = False
