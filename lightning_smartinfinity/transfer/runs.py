"""One batch of work on a device, straight into memory or in waves through the staging buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.transfer.batches import Memory, Piece
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.plan import CudaPartition, StagedPartition
from lightning_smartinfinity.transfer.staging import StagingBuffer, Wave, waves_of

__all__ = ["BatchMaker", "DirectRun", "Run", "StagedRun"]

BatchMaker = Callable[[Sequence[int], Memory], Iterable[native.Batch]]
"""Makes the batch of some tasklets whose parameters lie in some memory, in parts; each when it is asked for."""


class Run(ABC):
    """Tasklets on their way through the device. ``start``, then ``wait`` and ``drain`` or ``stop``."""

    @abstractmethod
    def start(self) -> None:
        """Start; return at once."""

    @abstractmethod
    def wait(self, tasklets: Sequence[int]) -> None:
        """Return when the parameters of those of these tasklets of the layout that are worked are in the partition.

        Raises:
            StorageError: The work failed; only :meth:`stop` may follow.
            CudaError: The same, on a CUDA device.
        """

    @abstractmethod
    def drain(self) -> None:
        """Return when everything is done and the device free. Raises as :meth:`wait`."""

    @abstractmethod
    def stop(self) -> None:
        """Abandon the work: return when the device is free, with the work done or not. Never raises these errors."""


class DirectRun(Run):
    """All tasklets as one batch.

    Args:
        device: Open and free.
        parts: The work: a batch, and others with more of its tasklets, made while the device works.
        tasklets: Its tasklets in the parts' order, as numbered by the layout.
        partition: Where its parameters are, if in a CUDA device's memory.
    """

    def __init__(
        self,
        device: StorageDevice,
        parts: Iterable[native.Batch],
        tasklets: Sequence[int],
        *,
        partition: CudaPartition | None = None,
    ) -> None:
        self._device = device
        self._parts = parts
        self._tasklets = tasklets
        self._partition = partition
        self._positions = {tasklet: position for position, tasklet in enumerate(tasklets)}
        self._active = False

    def extend(self, parts: Iterable[native.Batch], tasklets: Sequence[int]) -> None:
        """Start more tasklets, behind those there are; return at once. Parameters are in host memory."""
        assert self._partition is None
        first = len(self._positions)
        self._positions.update((tasklet, first + number) for number, tasklet in enumerate(tasklets))
        for part in parts:
            if self._active:
                self._device.extend(part)
            else:
                self._active = True
                self._device.submit(part)

    def prefer(self, tasklets: Sequence[int]) -> None:
        """Begin these of its tasklets, as far as they have not begun, before the others, in this order."""
        self._device.prefer([self._positions[tasklet] for tasklet in tasklets])

    def start(self) -> None:
        if self._tasklets:
            # First, so that an interrupt in submit() leaves nothing undrained.
            self._active = True
            if self._partition is not None:
                self._partition.take()
            parts = iter(self._parts)
            self._device.submit(next(parts))
            for part in parts:
                self._device.extend(part)
            if self._partition is not None:
                self._partition.link.warn_of_unregistered()

    def wait(self, tasklets: Sequence[int]) -> None:
        positions = [self._positions[tasklet] for tasklet in tasklets if tasklet in self._positions]
        if self._active and positions:
            self._device.wait(positions)
            if self._partition is not None:
                self._partition.give()

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


class StagedRun(Run):
    """Wave after wave through the two halves of the staging buffer.

    The caller's waits drive it: a wave is copied to the partition, and the next one started, when somebody waits. While
    a wave runs, its predecessor's parameters travel to the partition. What an interrupt broke off the next wait takes
    up, but for a wave of which nobody knows whether the device has it.

    Args:
        device: Open and free.
        make_batch: Makes a wave's batch.
        tasklets: All tasklets in the order in which they are worked, as numbered by the layout.
        pieces: What to copy to the partition, in partition order.
        partition: Where parameters go.
        staging: The buffer.
        layout: The partition's layout.
    """

    def __init__(
        self,
        device: StorageDevice,
        make_batch: BatchMaker,
        tasklets: Sequence[int],
        pieces: Sequence[Piece],
        *,
        partition: StagedPartition,
        staging: StagingBuffer,
        layout: PartitionLayout,
    ) -> None:
        self._device = device
        self._make_batch = make_batch
        self._pieces = pieces
        self._partition = partition
        self._waves = waves_of(layout, tasklets, staging)
        self._wave_of = {tasklet: number for number, wave in enumerate(self._waves) for tasklet in wave.tasklets}
        self._num_begun = 0
        self._num_put = 0
        # Of the wave that was begun last.
        self._current: DirectRun | None = None
        self._is_handed_out = True

    def start(self) -> None:
        self._begin_next()

    def wait(self, tasklets: Sequence[int]) -> None:
        last = max((self._wave_of[tasklet] for tasklet in tasklets if tasklet in self._wave_of), default=-1)
        self._finish_waves(last + 1)

    def drain(self) -> None:
        self._finish_waves(len(self._waves))

    def stop(self) -> None:
        if self._current is not None:
            self._current.stop()
        self._current = None
        with suppress(SmartInfinityError):  # as in DirectRun: the caller knows, or abandons the work anyway
            self._partition.synchronize()

    def _finish_waves(self, count: int) -> None:
        """Return when so many are in the partition."""
        while self._num_put < count:
            if not self._is_handed_out:
                raise StorageError("An interrupt came while a part of the step began.", "Undo it.")
            self._finish_wave(self._waves[self._num_put])
        self._partition.synchronize()

    def _finish_wave(self, wave: Wave) -> None:
        if self._num_begun == self._num_put + 1:
            assert self._current is not None
            self._current.drain()
            # Before the next wave overwrites the other half; its copies had all this wave's time.
            self._partition.synchronize()
            self._begin_next()
        wave.put(self._pieces, self._partition)
        self._num_put += 1

    def _begin_next(self) -> None:
        if self._num_begun == len(self._waves):
            return
        wave = self._waves[self._num_begun]
        run = DirectRun(self._device, self._make_batch(wave.tasklets, wave), wave.tasklets)
        self._is_handed_out = False
        self._current = run
        self._num_begun += 1
        run.start()
        self._is_handed_out = True
