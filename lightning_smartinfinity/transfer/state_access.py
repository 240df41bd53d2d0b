"""State read and written outside of steps: the first state, checkpoints, single parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import StorageDevice
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.store import StateStore
from lightning_smartinfinity.transfer.batches import (
    FlatMemory,
    Piece,
    Places,
    Span,
    cut,
    tasklets_in,
    whole_sub_groups,
)
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.plan import CudaPartition, Flat, StagedPartition
from lightning_smartinfinity.transfer.runs import DirectRun
from lightning_smartinfinity.transfer.staging import StagingBuffer, waves_of
from lightning_smartinfinity.transfer.windows import Window, WindowWalk
from lightning_smartinfinity.transfer.work import array_batch, start_batch

__all__ = ["StateAccess", "Together", "commit_next", "committing", "places_of"]

Together = Callable[[], AbstractContextManager[object]]
"""Makes a context whose end raises if its body raised in another process of the training."""

_FP32_BYTES = 4


def places_of(store: StateStore) -> Places:
    """Where the store's extents lie and where the next generation's go."""
    return Places(
        store.placement, store.next_placement(), store.tasklet_generations, store.generation + 1, store.blocks
    )


def commit_next(store: StateStore, places: Places, tasklets: Sequence[int], steps: NDArray[np.int64]) -> None:
    """Make the next generation current, in which these tasklets have been written.

    Args:
        store: The store.
        places: Where they were written.
        tasklets: Those written.
        steps: int64[num_parameters] of the next generation.

    Raises:
        StorageError: The record could not be written.
    """
    generations = store.tasklet_generations.copy()
    written = np.asarray(tasklets, np.intp)
    placement = store.placement.after(places.following, written)
    generations[written] = places.next_generation
    store.commit(generation=places.next_generation, placement=placement, tasklet_generations=generations, steps=steps)


@contextmanager
def committing(store: StateStore, generation: int, together: Together) -> Iterator[None]:
    """Around writing and committing a generation; if another process could not commit it, it is taken back here.

    With one slot there is nothing to go back to: the generation stays.

    Args:
        store: The store.
        generation: The one to commit; current already if it was committed and its agreement was interrupted.
        together: Entered around the body.

    Raises:
        SmartInfinityError: What the body raised, here or elsewhere.
    """
    try:
        with together():
            yield
    except SmartInfinityError:
        if store.generation == generation and store.extents.num_slots > 1:
            store.revert()
        raise


class _FirstArrays:
    """What every array but the master begins with: one value all over, in memory for one tasklet.

    Args:
        layout: The partition.
        values: Of each array but the master; none: zeros.
    """

    def __init__(self, layout: PartitionLayout, values: Sequence[float]) -> None:
        numel = min(layout.extents.tasklet_numel, layout.numel)
        self._arrays = [np.full(numel, value, np.float32) if value else None for value in values]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of each array, the master's first; 0: zeros."""
        return (0, *(0 if array is None else array.ctypes.data for array in self._arrays))


class StateAccess:
    """The methods of the same names of ``TransferHandler``; no batch may be in flight.

    Args:
        layout: The partition.
        store: Its state.
        device: Open.
        names: Of the arrays, ``UpdateRule.arrays``.
    """

    def __init__(
        self, layout: PartitionLayout, store: StateStore, device: StorageDevice, *, names: Sequence[str]
    ) -> None:
        self._layout = layout
        self._store = store
        self._device = device
        self._names = tuple(names)

    def initialize(self, masters: Sequence[Flat], values: Sequence[float]) -> None:
        self._start(FlatMemory(self._layout, masters), values)

    def initialize_from_cuda(self, masters: CudaPartition, values: Sequence[float]) -> None:
        self._start(FlatMemory(self._layout, masters.flats, stream=masters.stream), values, masters)

    def _start(self, memory: FlatMemory, values: Sequence[float], partition: CudaPartition | None = None) -> None:
        pieces, first = self._all_pieces(), _FirstArrays(self._layout, values)
        tasklets, places = tasklets_in(pieces), self._next_places()
        batch = start_batch(self._layout, pieces, tasklets, places, masters=memory, arrays=first.addresses)
        self._work(batch, tasklets, partition)
        commit_next(self._store, places, tasklets, np.zeros_like(self._store.steps))

    def initialize_staged(self, masters: StagedPartition, staging: StagingBuffer, values: Sequence[float]) -> None:
        pieces, places = self._all_pieces(), self._next_places()
        tasklets, first = tasklets_in(pieces), _FirstArrays(self._layout, values)
        for wave in waves_of(self._layout, tasklets, staging):
            wave.get(pieces, masters)
            masters.synchronize()
            batch = start_batch(self._layout, pieces, wave.tasklets, places, masters=wave, arrays=first.addresses)
            self._work(batch, wave.tasklets)
        commit_next(self._store, places, tasklets, np.zeros_like(self._store.steps))

    def scan(self, visit: Callable[[Window], object]) -> None:
        self._walk(places_of(self._store)).read(visit)

    def replace(self, fill: Callable[[Window], object], *, steps: NDArray[np.int64], together: Together) -> None:
        assert len(steps) == len(self._layout.parameters)
        with committing(self._store, self._store.generation + 1, together):
            places = self._next_places()
            self._walk(places).write(fill)
            commit_next(self._store, places, range(self._layout.extents.num_tasklets), np.asarray(steps, np.int64))

    def read_parameter(self, parameter: int, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        numel = self._layout.parameters[parameter].real_numel
        values = {name: np.empty(numel, np.float32) for name in names}
        addresses = self._in_parameters({parameter: values})
        self._move(native.Operation.READ, self._pieces_of([parameter]), places_of(self._store), addresses)
        return values

    def modify(self, values: Mapping[int, Mapping[str, NDArray[np.float32]]], *, together: Together) -> None:
        kept = {index: self._checked(index, arrays) for index, arrays in values.items()}
        self._modify(self._pieces_of(sorted(kept)), self._in_parameters(kept), together)

    def read_range(self, begin: int, end: int, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        values = {name: np.empty(end - begin, np.float32) for name in names}
        addresses = self._in_range(begin, values)
        self._move(native.Operation.READ, self._pieces_between(begin, end), places_of(self._store), addresses)
        return values

    def modify_range(self, begin: int, values: Mapping[str, NDArray[np.float32]], *, together: Together) -> None:
        (numel,) = {len(array) for array in values.values()}
        assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in values.values())
        self._modify(self._pieces_between(begin, begin + numel), self._in_range(begin, values), together)

    def _modify(
        self, pieces: Sequence[Piece], addresses: Callable[[Piece], tuple[int, ...]], together: Together
    ) -> None:
        with committing(self._store, self._store.generation + 1, together):
            places = self._next_places()
            self._move(native.Operation.MODIFY, pieces, places, addresses)
            commit_next(self._store, places, tasklets_in(pieces), self._store.steps)

    def _walk(self, places: Places) -> WindowWalk:
        return WindowWalk(self._layout, self._device, places, nbytes=self._device.ring_bytes)

    def _next_places(self) -> Places:
        self._store.require_usable()
        return places_of(self._store)

    def _all_pieces(self) -> list[Piece]:
        return cut(self._layout, whole_sub_groups(self._layout, range(len(self._layout.sub_groups))))

    def _pieces_of(self, parameters: Sequence[int]) -> list[Piece]:
        """Without padding; the parameter is the key."""
        slices = [(index, self._layout.parameters[index]) for index in parameters]
        return cut(
            self._layout, [Span(s.offset, s.offset + s.real_numel, index) for index, s in slices if s.real_numel]
        )

    def _pieces_between(self, begin: int, end: int) -> list[Piece]:
        """With padding."""
        groups = [(max(begin, g.offset), min(end, g.offset + g.numel), g.index) for g in self._layout.sub_groups]
        return cut(self._layout, [Span(*span) for span in groups if span[0] < span[1]])

    def _move(
        self,
        operation: native.Operation,
        pieces: Sequence[Piece],
        places: Places,
        addresses: Callable[[Piece], tuple[int, ...]],
    ) -> None:
        tasklets = tasklets_in(pieces)
        batch = array_batch(operation, self._layout, pieces, tasklets, places, addresses=addresses)
        self._work(batch, tasklets)

    def _work(self, batch: native.Batch, tasklets: Sequence[int], partition: CudaPartition | None = None) -> None:
        run = DirectRun(self._device, [batch], tasklets, partition=partition)
        try:
            run.start()
            run.drain()
        finally:
            run.stop()  # after an interrupt the device is still at work

    def _in_parameters(
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

    def _in_range(self, begin: int, values: Mapping[str, NDArray[np.float32]]) -> Callable[[Piece], tuple[int, ...]]:
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
