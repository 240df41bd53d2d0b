"""Reads ranges of a rank's kept state from storage, preferably in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import StorageCorruptError
from lightning_smartinfinity.pipeline.layout.batches import Piece, Places, cut, whole_sub_groups
from lightning_smartinfinity.pipeline.layout.partition_layout import (
    ParameterSlice,
    PartitionLayout,
    described_slices,
    layout_over,
)
from lightning_smartinfinity.pipeline.parameters.submissions import DirectSubmission
from lightning_smartinfinity.pipeline.state.work import array_batch
from lightning_smartinfinity.storage.extents import blocks_of
from lightning_smartinfinity.storage.folders.manifest import Manifest
from lightning_smartinfinity.storage.io.deadlines import in_time
from lightning_smartinfinity.storage.state.reading import StoreToRead, open_to_read

__all__ = ["StoredState"]

_FP32_BYTES = 4


class StoredState:
    """One generation of a rank's state on storage, locked against other processes until :meth:`close`.

    It holds one tasklet in host memory and reads another one on demand. Reading ascending ranges reads every tasklet
    once.

    Args:
        paths: The rank's folders, in the order of its storage folders.
        rank: Number of the rank.
        generation: The generation.
        io_timeout: ``TransferConfig.io_timeout``.

    Raises:
        StorageLockedError: A process uses one of the folders.
        StorageError: A folder or file cannot be opened, or is damaged.
    """

    def __init__(self, paths: Sequence[Path], *, rank: int, generation: int, io_timeout: float) -> None:
        self._opened = ExitStack()
        try:
            opening = partial(open_to_read, paths, rank=rank, generation=generation, opened=self._opened)
            store = in_time(
                opening, doing="Opening", path=paths[0], seconds=io_timeout, undo=lambda _: self._opened.close()
            )
            self._layout = _layout_of(store.manifest)
            self._places = _places_of(store)
            self._device = HostDevice(num_buffers=1, io_timeout=io_timeout)
            self._opened.callback(self._device.close)
            extents = self._layout.extents
            self._device.open(
                files=store.files,
                identity=store.manifest.identity,
                buffer_bytes=max((extent.nbytes for extent in extents.extents), default=0),
            )
        except BaseException:
            self._opened.close()
            raise
        self._steps = store.record.steps
        self._pieces = cut(self._layout, whole_sub_groups(self._layout, range(len(self._layout.sub_groups))))
        self._held = -1  # the tasklet in memory
        shape = (extents.num_arrays, min(extents.tasklet_numel, extents.numel))
        self._arrays = np.empty(shape, np.float32)

    @cached_property
    def slices(self) -> dict[str, ParameterSlice]:
        """The rank's slice of every parameter, by the parameter's name."""
        return {parameter.name: parameter for parameter in self._layout.parameters}

    @cached_property
    def steps(self) -> dict[str, int]:
        """Number of updates of every parameter, by its name."""
        names = (parameter.name for parameter in self._layout.parameters)
        return dict(zip(names, self._steps.tolist(), strict=True))

    def read(self, begin: int, arrays: Sequence[NDArray[np.float32]]) -> None:
        """Read elements of the flat partition.

        Args:
            begin: First element.
            arrays: One array for each name in ``UpdateRule.arrays``, all of one length; each is filled completely.

        Raises:
            StorageError: The state cannot be read, or differs from the state written.
        """
        done, wanted = 0, len(arrays[0])
        while done < wanted:
            tasklet, skipped = divmod(begin + done, self._layout.extents.tasklet_numel)
            self._hold(tasklet)
            numel = min(wanted - done, self._layout.tasklets[tasklet].numel - skipped)
            for into, held in zip(arrays, self._arrays, strict=True):
                into[done : done + numel] = held[skipped : skipped + numel]
            done += numel

    def _hold(self, tasklet: int) -> None:
        if self._held == tasklet:
            return
        self._held = -1
        first = self._layout.tasklets[tasklet].offset

        def addresses(piece: Piece) -> tuple[int, ...]:
            return tuple(array[piece.begin - first :].ctypes.data for array in self._arrays)

        def make_parts(tasklets: Sequence[int]) -> list[native.Batch]:
            read = native.Operation.READ
            return [array_batch(read, self._layout, self._pieces, tasklets, self._places, addresses=addresses)]

        submission = DirectSubmission(self._device, make_parts, [tasklet])
        try:
            submission.start()
            submission.finish()
        finally:
            submission.stop()  # after an interrupt, no transfer may outlive the memory
        self._held = tasklet

    def close(self) -> None:
        """Close the files and release the folders' locks; idempotent."""
        self._opened.close()


def _layout_of(manifest: Manifest) -> PartitionLayout:
    try:
        return layout_over(described_slices(manifest.description.parameters), manifest.extents)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise StorageCorruptError(
            f"The manifest in {manifest.folders[0]!r} does not describe the parameters whose state is there.",
            "Begin anew, or resume from a checkpoint.",
        ) from error


def _places_of(store: StoreToRead) -> Places:
    record = store.record  # nothing is written, so the places of the next generation are not used
    blocks = blocks_of(store.manifest.extents)
    return Places(record.placement, record.placement, record.tasklet_generations, record.generation, blocks)
