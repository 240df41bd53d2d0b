"""Tasklets that are handed to a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.transfer.batches import Memory, Piece
from lightning_smartinfinity.transfer.layout import PartitionLayout

__all__ = ["Assignment", "BatchMaker", "DirectSubmission", "Direction", "Link", "PartMaker", "Submission"]

BatchMaker = Callable[[Memory, Sequence[int]], Iterable[native.Batch]]
"""Makes the batch of some tasklets whose parameters lie in this memory, in parts; each when it is asked for."""

PartMaker = Callable[[Sequence[int]], Iterable[native.Batch]]
"""Makes the batch of some tasklets, in parts; each when it is asked for."""


class Direction(Enum):
    """The direction in which the parameters of an assignment travel."""

    TO_PARTITION = auto()
    FROM_PARTITION = auto()


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Work on tasklets and their parameters.

    Args:
        device: The device that does it, open and free.
        layout: The partition's layout.
        make_batch: Makes the batch of some of the tasklets.
        tasklets: The tasklets in the order in which they are worked, as numbered by the layout.
        pieces: The pieces of these tasklets, in partition order. Parameters of those with a negative key stay as they
            are.
        direction: The direction in which parameters travel.
    """

    device: StorageDevice
    layout: PartitionLayout
    make_batch: BatchMaker
    tasklets: Sequence[int]
    pieces: Sequence[Piece]
    direction: Direction = Direction.TO_PARTITION


class Link(Protocol):
    """The user of a CUDA device, as a submission sees it; ``transfer.cuda.CudaLink`` stands for torch."""

    @property
    def stream(self) -> native.CudaStream:
        """The stream on which parameters travel."""

    def take(self) -> None:
        """Lets copies from now on run after what the user's stream was given so far."""

    def give(self) -> None:
        """Lets what the user's stream is given from now on run after the copies started so far."""

    def warn_of_unregistered(self) -> None:
        """Warns, once, if host memory could not be registered."""


class Submission(ABC):
    """Tasklets on their way through the device. ``start``, then ``wait`` and ``drain`` or ``stop``."""

    @abstractmethod
    def start(self) -> None:
        """Starts the work and returns at once."""

    @abstractmethod
    def wait(self, tasklets: Sequence[int]) -> None:
        """Returns when the parameters of these tasklets, as far as they are submitted, are in the partition.

        Raises:
            StorageError: The work failed; only :meth:`stop` may follow.
            CudaError: Copying parameters from or to a CUDA device failed; likewise.
        """

    @abstractmethod
    def drain(self) -> None:
        """Returns when everything is done and the device free. Raises as :meth:`wait`."""

    @abstractmethod
    def stop(self) -> None:
        """Abandons the work: returns when the device is free, with the work done or not. Never raises these errors."""

    def extend(self, tasklets: Sequence[int]) -> None:
        """Starts more tasklets, behind those there are, and returns at once."""
        raise NotImplementedError("Only a submission straight into memory can be extended.")

    def prefer(self, tasklets: Sequence[int]) -> None:
        """Moves these tasklets, in this order, ahead of the others that have not started."""
        raise NotImplementedError("Only a submission straight into memory has an order that can change.")


class DirectSubmission(Submission):
    """All tasklets as one batch, straight from and into memory.

    Args:
        device: The device, open and free.
        make_parts: Makes the batch. Its first part is submitted, the others are added while the device works.
        tasklets: Its tasklets in the parts' order, as numbered by the layout.
        link: The link to the user of the CUDA device in whose memory parameters lie; None: they lie in host memory.
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
        assert self._link is None, "parameters are in host memory"
        parts = self._make_parts(tasklets)
        first = len(self._positions)
        self._positions.update((tasklet, first + number) for number, tasklet in enumerate(tasklets))
        for part in parts:
            if self._active:
                self._device.extend(part)
            else:
                self._active = True
                self._device.submit(part)

    def prefer(self, tasklets: Sequence[int]) -> None:
        self._device.prefer([self._positions[tasklet] for tasklet in tasklets])

    def start(self) -> None:
        if self._positions:
            # First, so that an interrupt in submit() leaves nothing undrained.
            self._active = True
            if self._link is not None:
                self._link.take()
            parts = iter(self._parts)
            self._device.submit(next(parts))
            for part in parts:
                self._device.extend(part)
            if self._link is not None:
                self._link.warn_of_unregistered()

    def wait(self, tasklets: Sequence[int]) -> None:
        positions = [self._positions[tasklet] for tasklet in tasklets if tasklet in self._positions]
        if self._active and positions:
            self._device.wait(positions)
            if self._link is not None:
                self._link.give()

    def drain(self) -> None:
        if self._active:
            try:
                self._device.drain()
            except SmartInfinityError:
                self._active = False
                raise
            # Not after an interrupt: the device is still at work.
            self._active = False

    def stop(self) -> None:
        if self._active:
            self._device.abandon()
            self._active = False
