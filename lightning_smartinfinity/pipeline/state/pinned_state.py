"""Reads the state of one generation while later steps write the next ones."""

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
    """A rank's state as it was committed, from the pin to :meth:`release`.

    Args:
        layout: The partition.
        store: The store that holds it. It stays open until :meth:`scan` has returned.
        pin: The pinned generation.
        count_read: Is told how many bytes were read, as they are.
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
        """The generation."""
        return self._pin.record.generation

    def scan(self, device: StorageDevice, visit: Callable[[Window], object]) -> None:
        """Pass the whole state to ``visit``, window after window in partition order, and release what was read.

        Any thread may call it, once.

        Args:
            device: A closed device of its own, which is opened over the store's files and closed in the end.
            visit: Called with each window, whose arrays hold the state during the call.

        Raises:
            StorageError: The state could not be read, or is not what was written.
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
        """Give all places up."""
        self._pin.release_all()
