"""Chooses the scalars of a step, and builds batches that move parameters or whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.native import UpdateStep
from lightning_smartinfinity.pipeline.layout.batches import Memory, Piece, Places, segments_of
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.rules import UpdateRule

__all__ = ["Updates", "array_batch", "choose_updates", "read_back_batch", "start_batch"]


Origin = tuple[Any, int, float]  # hyperparameters, step, gradient scale


class Updates:
    """The scalars that one step uses to update each parameter.

    Args:
        keys: int64[num_parameters]: an index into ``steps``, or -1 if the parameter is not updated.
        steps: The distinct scalars.
        origins: Hyperparameters (a dataclass), step and gradient scale from which each of ``steps`` was computed.
        counts: A parameter's number of updates after each of ``steps``.
    """

    def __init__(
        self,
        keys: NDArray[np.int64],
        steps: list[UpdateStep],
        *,
        origins: Sequence[Origin],
        counts: Sequence[int],
    ) -> None:
        self.keys = keys
        self.steps = steps
        self.origins = origins
        self._counts = counts

    def counts_after(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64[num_parameters]: updates of each parameter after the step, given those before it."""
        # Key -1 selects the appended 0, which np.where discards.
        return np.where(self.keys >= 0, np.append(np.asarray(self._counts, np.int64), 0)[self.keys], counts)

    def difference_to(self, other: Updates, parameters: NDArray[np.int64]) -> str | None:
        """Describe how the updates of these parameters (indices) differ; None if both compute the same bits."""
        # Even with many thousand parameters, only a few distinct pairs of keys occur.
        pairs = np.unique(np.stack([self.keys[parameters], other.keys[parameters]], axis=1), axis=0)
        for ours, theirs in pairs.tolist():
            if ours < 0 or theirs < 0:
                return "a parameter has no gradient"
            if self.origins[ours] != other.origins[theirs]:
                return _difference(self.origins[ours], other.origins[theirs])
        return None


def _difference(ours: Origin, theirs: Origin) -> str:
    settings = zip(asdict(ours[0]).items(), asdict(theirs[0]).values(), strict=True)
    changed = [f"{name} was {value!r} and is {new!r}" for (name, value), new in settings if value != new]
    if ours[1] != theirs[1]:
        changed.append(f"the number of the step was {ours[1]} and is {theirs[1]}")
    if ours[2] != theirs[2]:
        changed.append(f"gradients were to be multiplied by {ours[2]:g}, and now by {theirs[2]:g}, as clipping does")
    return ", ".join(changed)


def choose_updates(
    layout: PartitionLayout,
    rule: UpdateRule,
    groups: Sequence[Mapping[str, Any]],
    *,
    active: NDArray[np.bool_],
    steps: NDArray[np.int64],
    gradient_scale: float,
) -> Updates:
    """Choose scalars for each parameter; parameters with equal hyperparameters and update counts share them.

    Args:
        layout: The partition.
        rule: The optimizer's update rule.
        groups: The optimizer's param groups; those without an active parameter are not read.
        active: bool[num_parameters]: whether each parameter is updated.
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
    # Each pair of settings and step count becomes one number.
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


def read_back_batch(
    layout: PartitionLayout, pieces: Sequence[Piece], tasklets: Sequence[int], places: Places, *, outputs: Memory
) -> native.Batch:
    """Make the batch that reads current masters back into the parameters of the pieces with a key of 0 or more."""

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
    """Make the batch that writes the first state, with masters widened from the parameters.

    Args:
        layout: The partition.
        pieces: Pieces that cover the partition.
        tasklets: Indices of the tasklets to write.
        places: Places of the extents.
        masters: Memory of the parameters.
        arrays: Address of each array's initial content in every piece; 0 means zeros, and for the master the parameter.
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
    io_class: native.IoClass = native.IoClass.STATE,
) -> native.Batch:
    """Make the batch that moves fp32 arrays between storage and memory.

    Args:
        operation: READ, WRITE or MODIFY.
        layout: The partition.
        pieces: Elements to move.
        tasklets: Indices of the pieces' tasklets.
        places: Places of the extents.
        addresses: Returns the address of each array at a piece's first element; 0 means that the array is not moved.
        io_class: Priority of the I/O.
    """

    def segment(offset: int, piece: Piece) -> native.Segment:
        return native.Segment(offset=offset, numel=piece.end - piece.begin, arrays=addresses(piece))

    return _batch(operation, layout, pieces, tasklets, places, segment, io_class=io_class)


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
    io_class: native.IoClass = native.IoClass.STATE,
) -> native.Batch:
    listed = segments_of(layout, pieces, tasklets, segment=segment)
    worked = [places.tasklet(layout, index, segments) for index, segments in listed]
    return native.Batch(operation, worked, stream=stream, io_class=io_class, writes_back=places.writes_back)
