"""Reads and writes state outside of steps: the first state, checkpoints, single parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.common.progress import Advance, Show
from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.errors import SmartInfinityError, StorageTimeoutError
from lightning_smartinfinity.pipeline.layout.batches import (
    Memory,
    Piece,
    Places,
    Span,
    cut,
    tasklets_in,
    whole_sub_groups,
)
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.parameters.partitions import ParameterMemory, StagingMaker
from lightning_smartinfinity.pipeline.parameters.submissions import Assignment, Direction, DirectSubmission, Submission
from lightning_smartinfinity.pipeline.state.windows import Window, WindowWalk
from lightning_smartinfinity.pipeline.state.work import array_batch, start_batch
from lightning_smartinfinity.storage import StateStore
from lightning_smartinfinity.storage.spread import Placement
from lightning_smartinfinity.storage.state.state_store import Together

__all__ = ["StateAccess", "commit_next", "committing", "places_of"]

_FP32_BYTES = 4
_TASKLETS_AT_ONCE = 64  # between looks at the time


def places_of(store: StateStore) -> Places:
    """Return the places of the store's extents and those of the next generation."""
    return Places(
        store.placement,
        store.next_placement(),
        store.tasklet_generations,
        store.generation + 1,
        store.blocks,
        store.writes_back,
    )


def commit_next(store: StateStore, places: Places, tasklets: Sequence[int], steps: NDArray[np.int64]) -> None:
    """Make the next generation current after these tasklets have been written.

    Args:
        store: The store.
        places: The places to which the tasklets were written.
        tasklets: Indices of the tasklets written.
        steps: int64[num_parameters]: updates of each parameter in the next generation.

    Raises:
        StorageError: The record could not be written.
    """
    generations = store.tasklet_generations.copy()
    written = np.asarray(tasklets, np.intp)
    placement = store.placement.after(places.following, written)
    generations[written] = places.next_generation
    store.commit(generation=places.next_generation, placement=placement, tasklet_generations=generations, steps=steps)


@contextmanager
def committing(
    store: StateStore, generation: int, together: Together, *, overwritten: Callable[[], bool]
) -> Iterator[None]:
    """Make the context in which a generation is written and committed; roll back if another process failed.

    With one place per tasklet the new generation stays current, because the previous one no longer exists. If state in
    memory was overwritten that is written back, the generation is lost, unless only the ranks' agreement on its commit
    was interrupted.

    Args:
        store: The store.
        generation: The generation to commit; already current if it was committed but the ranks' agreement was
            interrupted.
        together: Context entered around the body.
        overwritten: Function that returns whether state in memory was overwritten.

    Raises:
        SmartInfinityError: The body raised it, here or on another rank.
    """
    try:
        with together():
            yield
    except SmartInfinityError as error:
        if store.writes_back and overwritten():
            store.lose(error)
        elif store.generation == generation and store.can_revert:
            store.revert()
        raise


class _FirstArrays:
    """Initial content of every array except the master: one value, repeated over the memory of one tasklet.

    Args:
        layout: The partition.
        values: Value of each array except the master; empty means zeros.
    """

    def __init__(self, layout: PartitionLayout, values: Sequence[float]) -> None:
        numel = min(layout.extents.tasklet_numel, layout.numel)
        self._arrays = [np.full(numel, value, np.float32) if value else None for value in values]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address of each array's initial content, starting with the master's; 0 means zeros."""
        return (0, *(0 if array is None else array.ctypes.data for array in self._arrays))


class StateAccess:
    """A rank's committed state on storage, read and replaced outside of steps; no batch may be in flight.

    Args:
        layout: The partition.
        store: The store that holds its state.
        device: The device, open.
        names: Names of the arrays, ``UpdateRule.arrays``.
    """

    def __init__(
        self, layout: PartitionLayout, store: StateStore, device: StorageDevice, *, names: Sequence[str]
    ) -> None:
        self._layout = layout
        self._store = store
        self._device = device
        self._names = tuple(names)
        self._overwrites = False  # whether the change in progress has overwritten state that is in memory only

    def initialize(
        self, masters: ParameterMemory, first_values: Sequence[float], staging: StagingMaker, *, show: Show
    ) -> None:
        """Write the first state and commit it; see ``TransferHandler.initialize``."""
        pieces, first = self._all_pieces(), _FirstArrays(self._layout, first_values)
        tasklets, places = tasklets_in(pieces), self._next_places()

        def make_batch(memory: Memory, tasklets: Sequence[int]) -> list[native.Batch]:
            return [start_batch(self._layout, pieces, tasklets, places, masters=memory, arrays=first.addresses)]

        assignment = Assignment(
            device=self._device,
            layout=self._layout,
            make_batch=make_batch,
            tasklets=tasklets,
            pieces=lambda: pieces,
            direction=Direction.FROM_PARTITION,
        )
        sizes = [self._store.extents.extents[tasklet].nbytes for tasklet in tasklets]
        with show("Writing the first optimizer state", sum(sizes)) as advance:
            _finish(
                masters.submission(assignment, staging), reported=zip(tasklets, sizes, strict=True), advance=advance
            )
        commit_next(self._store, places, tasklets, np.zeros_like(self._store.steps))

    def write_resident(self, placement: Placement, tasklets: NDArray[np.intp], *, deadline: float = math.inf) -> None:
        """Write the state of resident tasklets from memory to storage as it is.

        Args:
            placement: Places to write to.
            tasklets: intp[any number]: indices of the tasklets.
            deadline: Time of ``time.monotonic`` by which it must be done.

        Raises:
            StorageTimeoutError: It would take until after the deadline.
            StorageError: A tasklet could not be written.
        """
        places = places_of(self._store)._replace(following=placement, writes_back=False)
        begun, total = time.monotonic(), len(tasklets)
        for first in range(0, total, _TASKLETS_AT_ONCE):
            now = time.monotonic()
            if now + (now - begun) / max(first, 1) * (total - first) > deadline:
                raise StorageTimeoutError(
                    f"{first} of {total} tasklets of state in memory were written in {now - begun:.1f} s; the others "
                    "would take too long.",
                    "Pass a larger TransferConfig(flush_timeout=...).",
                )
            listed = tasklets[first : first + _TASKLETS_AT_ONCE].tolist()
            # Each is sealed with the generation that it has.
            worked = [
                places._replace(next_generation=int(places.generations[tasklet])).tasklet(self._layout, tasklet, [])
                for tasklet in listed
            ]
            batch = native.Batch(native.Operation.MODIFY, worked, io_class=native.IoClass.BACKGROUND)
            try:
                self._device.submit(batch)
                self._device.finish()
            finally:
                self._device.stop()

    def scan(self, visit: Callable[[Window], object]) -> None:
        """Pass the whole state to ``visit``, window by window in partition order.

        It needs as much host memory as the ring, and at least that of two tasklets.

        Args:
            visit: Called with each window, whose arrays hold the state during the call.

        Raises:
            StorageError: The state could not be read, or differs from the state written.
        """
        self._walk(places_of(self._store)).read(visit)

    def replace(
        self, fill: Callable[[Window], object], *, steps: NDArray[np.int64], together: Together = nullcontext
    ) -> None:
        """Replace the whole state, window by window in partition order, and commit it.

        It needs as much host memory as :meth:`scan`. It does not change the parameters in memory: the caller writes
        them. If ``fill`` or a write raises, here or (with ``together``) on another rank, the previous generation stays
        current. With one place per tasklet (``durability="none"``), or if state was overwritten that is in memory only,
        the state is lost.

        Args:
            fill: Called with each window; it must fill all of the window's arrays.
            steps: int64[num_parameters]: updates of each parameter.
            together: Context entered around writing and committing. With several ranks it must raise on every rank if
                its body raised on one, so that no rank keeps a generation that another could not commit.

        Raises:
            StorageError: The state could not be written.
        """
        assert len(steps) == len(self._layout.parameters)
        with self._changing(together):
            places = self._next_places()

            def fill_and_note(window: Window) -> None:
                fill(window)
                self._overwrites = self._store.num_held > 0  # the first window has the first tasklets

            self._walk(places).write(fill_and_note)
            commit_next(self._store, places, range(self._layout.extents.num_tasklets), np.asarray(steps, np.int64))

    def read_parameter(self, parameter: int, *, names: Sequence[str] | None = None) -> dict[str, NDArray[np.float32]]:
        """Read one parameter's arrays.

        Args:
            parameter: Parameter index.
            names: Names of the arrays to read; None means all.

        Returns:
            float32[real_numel] by name.

        Raises:
            StorageError: As :meth:`scan`.
        """
        numel = self._layout.parameters[parameter].real_numel
        values = {name: np.empty(numel, np.float32) for name in names or self._names}
        addresses = self._parameter_addresses({parameter: values})
        self._move(native.Operation.READ, self._pieces_of([parameter]), places_of(self._store), addresses)
        return values

    def modify(
        self, values: Mapping[int, Mapping[str, NDArray[np.float32]]], *, together: Together = nullcontext
    ) -> None:
        """Replace some arrays of some parameters, as one commit.

        It does not change the parameters in memory: after replacing a master, the caller writes the parameter. Every
        rank must call it the same number of times, so that all have the same generation.

        In a state format that rounds, values are rounded to nearest. Other elements keep their values, unless they
        share a block of 8-bit codes with new values so large that the block's exponent becomes too large for theirs.

        Args:
            values: float32[real_numel] by parameter index, then array name.
            together: As for :meth:`replace`.

        Raises:
            StorageError: The state could not be written; the previous generation stays current.
        """
        kept = {index: self._checked(index, arrays) for index, arrays in values.items()}
        self._modify(self._pieces_of(sorted(kept)), self._parameter_addresses(kept), together)

    def read_range(self, begin: int, end: int, *, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Read elements ``[begin, end)`` of the flat partition, padding included.

        Args:
            begin: First element.
            end: One past the last element.
            names: Names of the arrays to read.

        Returns:
            float32[end - begin] by name.

        Raises:
            StorageError: As :meth:`scan`.
        """
        values = {name: np.empty(end - begin, np.float32) for name in names}
        addresses = self._range_addresses(begin, values)
        self._move(native.Operation.READ, self._pieces_between(begin, end), places_of(self._store), addresses)
        return values

    def modify_range(
        self, begin: int, values: Mapping[str, NDArray[np.float32]], *, together: Together = nullcontext
    ) -> None:
        """Replace some arrays of consecutive elements of the flat partition, as :meth:`modify` does.

        Args:
            begin: First element.
            values: Contiguous float32 arrays of the same length, by array name.
            together: As for :meth:`replace`.

        Raises:
            StorageError: The state could not be written; the previous generation stays current.
        """
        (numel,) = {len(array) for array in values.values()}
        assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in values.values())
        self._modify(self._pieces_between(begin, begin + numel), self._range_addresses(begin, values), together)

    def _modify(
        self, pieces: Sequence[Piece], addresses: Callable[[Piece], tuple[int, ...]], together: Together
    ) -> None:
        with self._changing(together):
            places, tasklets = self._next_places(), tasklets_in(pieces)
            self._overwrites = any(tasklet < self._store.num_held for tasklet in tasklets)
            self._move(native.Operation.MODIFY, pieces, places, addresses)
            commit_next(self._store, places, tasklets, self._store.steps)

    @contextmanager
    def _changing(self, together: Together) -> Iterator[None]:
        """Make the context of a change outside of steps; see :func:`committing`."""
        generation, self._overwrites = self._store.generation + 1, False
        try:
            with committing(self._store, generation, together, overwritten=lambda: self._overwrites):
                yield
        except SmartInfinityError:
            raise
        except BaseException as error:  # an interrupt
            if self._store.writes_back and self._overwrites and self._store.generation < generation:
                self._store.lose(error)
            raise

    def _walk(self, places: Places) -> WindowWalk:
        return WindowWalk(self._layout, self._device, places, nbytes=self._device.ring_bytes)

    def _next_places(self) -> Places:
        self._store.require_usable()
        return places_of(self._store)

    def _all_pieces(self) -> list[Piece]:
        return cut(self._layout, whole_sub_groups(self._layout, range(len(self._layout.sub_groups))))

    def _pieces_of(self, parameters: Sequence[int]) -> list[Piece]:
        """Return the pieces of these parameters, without padding; the key is the parameter index."""
        slices = [(index, self._layout.parameters[index]) for index in parameters]
        return cut(
            self._layout, [Span(s.offset, s.offset + s.real_numel, index) for index, s in slices if s.real_numel]
        )

    def _pieces_between(self, begin: int, end: int) -> list[Piece]:
        """Return the pieces of these elements, padding included; the key is the sub-group's index."""
        groups = [(max(begin, g.offset), min(end, g.offset + g.numel), g.index) for g in self._layout.sub_groups]
        return cut(self._layout, [Span(*span) for span in groups if span[0] < span[1]])

    def _move(
        self,
        operation: native.Operation,
        pieces: Sequence[Piece],
        places: Places,
        addresses: Callable[[Piece], tuple[int, ...]],
    ) -> None:
        def make_parts(tasklets: Sequence[int]) -> list[native.Batch]:
            return [array_batch(operation, self._layout, pieces, tasklets, places, addresses=addresses)]

        _finish(DirectSubmission(self._device, make_parts, tasklets_in(pieces)))

    def _parameter_addresses(
        self, values: Mapping[int, Mapping[str, NDArray[np.float32]]]
    ) -> Callable[[Piece], tuple[int, ...]]:
        origins = {
            index: [arrays[name].ctypes.data if name in arrays else 0 for name in self._names]
            for index, arrays in values.items()
        }

        def addresses(piece: Piece) -> tuple[int, ...]:
            skipped = (piece.begin - self._layout.parameters[piece.key].offset) * _FP32_BYTES
            return tuple(origin + skipped if origin else 0 for origin in origins[piece.key])

        return addresses

    def _range_addresses(
        self, begin: int, values: Mapping[str, NDArray[np.float32]]
    ) -> Callable[[Piece], tuple[int, ...]]:
        assert set(values) <= set(self._names), f"unknown arrays: {sorted(values)}"
        origins = [values[name].ctypes.data if name in values else 0 for name in self._names]

        def addresses(piece: Piece) -> tuple[int, ...]:
            skipped = (piece.begin - begin) * _FP32_BYTES
            return tuple(origin + skipped if origin else 0 for origin in origins)

        return addresses

    def _checked(self, parameter: int, arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        numel = self._layout.parameters[parameter].real_numel
        assert set(arrays) <= set(self._names), f"unknown arrays: {sorted(arrays)}"
        for name, array in arrays.items():
            assert array.shape == (numel,), f"{name}: {array.shape} instead of ({numel},)"
        return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


def _finish(
    submission: Submission, *, reported: Iterable[tuple[int, int]] = (), advance: Advance = lambda nbytes: None
) -> None:
    """Start a submission and return when it is done.

    Args:
        submission: The submission.
        reported: Tasklets in their order, each with the bytes to report when it is done.
        advance: Called with the bytes of each tasklet that is done.
    """
    try:
        submission.start()
        for tasklet, nbytes in reported:
            submission.wait([tasklet])
            advance(nbytes)
        submission.finish()
    finally:
        submission.stop()  # after an interrupt, work is still in progress on the device
