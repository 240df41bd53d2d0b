"""The scalars of a step, and the batches that move parameters or whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.native import UpdateStep
from lightning_smartinfinity.transfer.batches import Memory, Piece, Places, segments_of
from lightning_smartinfinity.transfer.layout import PartitionLayout
from lightning_smartinfinity.transfer.rules import UpdateRule

__all__ = ["Updates", "array_batch", "choose_updates", "restore_batch", "start_batch"]


class Updates:
    """Which scalars each parameter is updated with in one step.

    Args:
        keys: int64[num_parameters]: an index into ``steps``, or -1: not updated.
        steps: The distinct scalars.
        origins: What each of them was computed from.
        counts: Of each, how many updates a parameter has had after it.
    """

    def __init__(
        self,
        keys: NDArray[np.int64],
        steps: list[UpdateStep],
        *,
        origins: Sequence[Hashable],
        counts: Sequence[int],
    ) -> None:
        self.keys = keys
        self.steps = steps
        self.origins = origins
        self._counts = counts

    def counts_after(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[num_parameters]: updates of each parameter after the step, from those before it."""
        return np.where(self.keys >= 0, np.append(np.asarray(self._counts, np.int64), 0)[self.keys], counts)

    def agrees(self, other: Updates, parameters: NDArray[np.int64]) -> bool:
        """Whether both update these parameters, given by their indices, and alike."""
        # In models of many thousand parameters only a few pairs of keys occur.
        pairs = np.unique(np.stack([self.keys[parameters], other.keys[parameters]], axis=1), axis=0)
        return all(
            ours >= 0 and theirs >= 0 and self.origins[ours] == other.origins[theirs] for ours, theirs in pairs.tolist()
        )


def choose_updates(
    layout: PartitionLayout,
    rule: UpdateRule,
    groups: Sequence[Mapping[str, Any]],
    *,
    active: NDArray[np.bool_],
    steps: NDArray[np.int64],
    gradient_scale: float,
) -> Updates:
    """Read the hyperparameters of the groups in use: parameters with equal ones and equal step counts share scalars.

    Args:
        layout: The partition.
        rule: The optimizer's.
        groups: Its param groups.
        active: bool[num_parameters].
        steps: int64[num_parameters]: updates so far.
        gradient_scale: Factor on every gradient.

    Raises:
        ConfigError: A hyperparameter is out of range.
    """
    group_of = layout.columns.groups
    used = np.unique(group_of[active]).tolist()
    snapshots = {group: rule.snapshot(groups[group]) for group in used}
    distinct = list(dict.fromkeys(snapshots.values()))
    setting_of_group = np.zeros(len(groups), np.int64)
    setting_of_group[used] = [distinct.index(snapshots[group]) for group in used]
    # One number for each pair of settings and step.
    stride = int(steps.max(initial=0)) + 2
    pairs, numbers = np.unique((setting_of_group[group_of] * stride + steps + 1)[active], return_inverse=True)
    keys = np.full(len(layout.parameters), -1, np.int64)
    keys[active] = numbers
    chosen = [divmod(pair, stride) for pair in pairs.tolist()]
    scalars = [rule.scalars(distinct[setting], step=step, gradient_scale=gradient_scale) for setting, step in chosen]
    return Updates(
        keys,
        scalars,
        origins=[(distinct[setting], step, gradient_scale) for setting, step in chosen],
        counts=[rule.count_after(distinct[setting], step) for setting, step in chosen],
    )


def restore_batch(
    layout: PartitionLayout, pieces: Sequence[Piece], tasklets: Sequence[int], places: Places, *, outputs: Memory
) -> native.Batch:
    """Read the current master back into the parameters of the pieces with a key of 0 or more."""

    def segment(offset: int, piece: Piece) -> native.Segment:
        return _parameter_segment(offset, piece, outputs if piece.key >= 0 else None)

    return _batch(native.Operation.READ, layout, pieces, tasklets, places, segment, stream=outputs.stream)


def start_batch(
    layout: PartitionLayout,
    pieces: Sequence[Piece],
    tasklets: Sequence[int],
    places: Places,
    *,
    masters: Memory,
    arrays: tuple[int, ...] = (),
) -> native.Batch:
    """Write the first state: masters widened from the parameters.

    Args:
        layout: The partition.
        pieces: All of it.
        tasklets: Those to write.
        places: Where extents lie.
        masters: The parameters.
        arrays: Addresses of what each array begins with in every piece, the master's being 0; 0: zeros.
    """

    def segment(offset: int, piece: Piece) -> native.Segment:
        return _parameter_segment(offset, piece, masters, arrays=arrays)

    return _batch(native.Operation.WRITE, layout, pieces, tasklets, places, segment, stream=masters.stream)


def array_batch(
    operation: native.Operation,
    layout: PartitionLayout,
    pieces: Sequence[Piece],
    tasklets: Sequence[int],
    places: Places,
    *,
    addresses: Callable[[Piece], tuple[int, ...]],
) -> native.Batch:
    """Move fp32 arrays between storage and memory.

    Args:
        operation: READ, WRITE or MODIFY.
        layout: The partition.
        pieces: Elements to move.
        tasklets: Those of the pieces.
        places: Where extents lie.
        addresses: Of each array at a piece's first element; 0: leave it alone.
    """

    def segment(offset: int, piece: Piece) -> native.Segment:
        return native.Segment(offset=offset, numel=piece.end - piece.begin, arrays=addresses(piece))

    return _batch(operation, layout, pieces, tasklets, places, segment)


def _parameter_segment(
    offset: int, piece: Piece, memory: Memory | None, *, arrays: tuple[int, ...] = ()
) -> native.Segment:
    numel = piece.end - piece.begin
    if memory is None:
        return native.Segment(offset=offset, numel=numel)
    return native.Segment(
        offset=offset, numel=numel, parameter=memory.address(piece), parameter_dtype=memory.dtype, arrays=arrays
    )


def _batch(
    operation: native.Operation,
    layout: PartitionLayout,
    pieces: Sequence[Piece],
    tasklets: Sequence[int],
    places: Places,
    segment: Callable[[int, Piece], native.Segment],
    *,
    stream: native.CudaStream | None = None,
) -> native.Batch:
    listed = segments_of(layout, pieces, tasklets, segment=segment)
    worked = [places.tasklet(layout, index, segments) for index, segments in listed]
    return native.Batch(operation, worked, stream=stream)
