"""Moves the whole state through limited host memory, in windows of a few tasklets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.pipeline.layout.batches import Piece, Places, cut, whole_sub_groups
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.parameters.submissions import DirectSubmission
from lightning_smartinfinity.pipeline.state.work import array_batch

__all__ = ["Window", "WindowBuffer", "WindowWalk"]

_FP32_BYTES = 4
_NUM_HALVES = 2


@dataclass(frozen=True, slots=True)
class Window:
    """The state of some consecutive tasklets in host memory.

    Args:
        begin: First element in the flat partition, padding included.
        end: One past the last element.
        arrays: One array for each name in ``UpdateRule.arrays``, ``end - begin`` long. Later windows use the same
            memory: copy what you keep.
    """

    begin: int
    end: int
    arrays: tuple[NDArray[np.float32], ...]


class WindowBuffer:
    """Two halves of host memory: the caller uses one while the other moves to or from storage.

    Args:
        layout: The partition.
        nbytes: Upper bound of both halves together; each holds at least one tasklet.
    """

    def __init__(self, layout: PartitionLayout, *, nbytes: int) -> None:
        extents = layout.extents
        bound = nbytes // (_NUM_HALVES * extents.num_arrays * extents.tasklet_numel * _FP32_BYTES)
        self._layout = layout
        self._tasklets_per_window = max(1, min(bound, extents.num_tasklets))
        numel = min(self._tasklets_per_window * extents.tasklet_numel, layout.numel)
        self._buffer = native.HostBuffer(max(1, _NUM_HALVES * extents.num_arrays * numel * _FP32_BYTES))
        shape = (_NUM_HALVES, extents.num_arrays, numel)
        self._halves = np.ndarray(shape, np.float32, self._buffer.memoryview())

    @property
    def nbytes(self) -> int:
        """Bytes of both halves."""
        return self._buffer.nbytes

    def windows(self) -> list[tuple[range, Window]]:
        """Return all windows in partition order, each with its tasklets; they use the halves alternately."""
        num_tasklets, step = self._layout.extents.num_tasklets, self._tasklets_per_window
        cuts = [range(begin, min(begin + step, num_tasklets)) for begin in range(0, num_tasklets, step)]
        return [(tasklets, self._window(tasklets, number % _NUM_HALVES)) for number, tasklets in enumerate(cuts)]

    def _window(self, tasklets: range, half: int) -> Window:
        begin, last = self._layout.tasklets[tasklets[0]].offset, self._layout.tasklets[tasklets[-1]]
        end = last.offset + last.numel
        return Window(begin, end, tuple(array[: end - begin] for array in self._halves[half]))


class WindowWalk:
    """Moves windows between storage and a buffer: reads one window ahead of the caller, or writes one after it.

    Its I/O has the lowest priority on the device.

    Args:
        layout: The partition.
        device: The device, open and free.
        places: Places of the extents, now and in the next generation.
        nbytes: Upper bound of the buffer; see :class:`WindowBuffer`.
    """

    def __init__(self, layout: PartitionLayout, device: StorageDevice, places: Places, *, nbytes: int) -> None:
        self._layout = layout
        self._device = device
        self._places = places
        self._buffer = WindowBuffer(layout, nbytes=nbytes)
        self._pieces = cut(layout, whole_sub_groups(layout, range(len(layout.sub_groups))))

    def read(self, visit: Callable[[Window], object]) -> None:
        """Call ``visit`` with each window in turn, while the next one is being read."""
        visited: Window | None = None
        with ExitStack() as in_flight:
            for tasklets, window in self._buffer.windows():
                submission = self._start(native.Operation.READ, tasklets, window, in_flight)
                if visited is not None:
                    visit(visited)
                submission.finish()
                visited = window
            if visited is not None:
                visit(visited)

    def write(self, fill: Callable[[Window], object]) -> None:
        """Call ``fill`` with each window in turn, while the previous one is being written."""
        with ExitStack() as in_flight:
            submission: DirectSubmission | None = None
            for tasklets, window in self._buffer.windows():
                fill(window)
                if submission is not None:
                    submission.finish()
                submission = self._start(native.Operation.WRITE, tasklets, window, in_flight)
            if submission is not None:
                submission.finish()

    def _start(
        self, operation: native.Operation, tasklets: range, window: Window, in_flight: ExitStack
    ) -> DirectSubmission:
        def addresses(piece: Piece) -> tuple[int, ...]:
            skipped = (piece.begin - window.begin) * _FP32_BYTES
            return tuple(array.ctypes.data + skipped for array in window.arrays)

        def make_parts(tasklets: Sequence[int]) -> list[native.Batch]:
            return [
                array_batch(
                    operation,
                    self._layout,
                    self._pieces,
                    tasklets,
                    self._places,
                    addresses=addresses,
                    io_class=native.IoClass.BACKGROUND,
                )
            ]

        submission = DirectSubmission(self._device, make_parts, tasklets)
        # Even after an error, no transfer may outlive the buffer.
        in_flight.callback(submission.stop)
        submission.start()
        return submission
