"""Reads the state of one generation while later steps write newer generations."""

from __future__ import annotations

from collections.abc import Callable

from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.pipeline.layout.batches import Places
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.state.windows import Window, WindowWalk
from lightning_smartinfinity.storage import StateStore
from lightning_smartinfinity.storage.state.pin import Pin

__all__ = ["PinnedState"]


class PinnedState:
    """A rank's committed state, kept from the pin until :meth:`release`.

    Args:
        layout: The partition.
        store: The store that holds the state. The caller keeps it open until :meth:`scan` has returned.
        pin: The pinned generation.
        count_read: Called with the number of bytes of each read.
    """

    def __init__(
        self, layout: PartitionLayout, store: StateStore, pin: Pin, *, count_read: Callable[[int], object]
    ) -> None:
        self._layout = layout
        self._store = store
        self._pin = pin
        self._count_read = count_read

    @property
    def generation(self) -> int:
        """The pinned generation."""
        return self._pin.record.generation

    def scan(self, device: StorageDevice, visit: Callable[[Window], object]) -> None:
        """Pass the whole state to ``visit``, window by window in partition order, and release the tasklets read.

        Any thread may call it, but only once.

        Args:
            device: A closed device that nothing else uses. It is opened over the store's files and closed at the end.
            visit: Called with each window, whose arrays hold the state during the call.

        Raises:
            StorageError: The state could not be read, or differs from the state written.
        """
        extents = self._layout.extents
        numel = extents.tasklet_numel

        def release_and_visit(window: Window) -> None:
            tasklets = range(window.begin // numel, -(-window.end // numel))
            self._pin.release(tasklets)
            self._count_read(sum(extents.extents[tasklet].nbytes for tasklet in tasklets))
            visit(window)

        # Nothing is written, so the places of the next generation are not used.
        record = self._pin.record
        places = Places(
            record.placement, record.placement, record.tasklet_generations, record.generation, self._store.blocks
        )
        device.open(
            files=self._store.files,
            identity=self._store.identity,
            buffer_bytes=max((extent.nbytes for extent in extents.extents), default=0),
        )
        try:
            WindowWalk(self._layout, device, places, nbytes=device.ring_bytes).read(release_and_visit)
        finally:
            device.close()

    def release(self) -> None:
        """Release all places."""
        self._pin.release_all()
