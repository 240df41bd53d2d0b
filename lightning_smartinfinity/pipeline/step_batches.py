"""The batches of one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.batches import (
    DTYPE_BYTES,
    Compression,
    FlatMemory,
    Memory,
    Piece,
    Places,
    cut,
    segments_of,
    spans_of,
    tasklets_in,
)
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.state.work import Updates, read_back_batch
from lightning_smartinfinity.pipeline.step_plan import StepPlan

__all__ = ["StepBatches"]


class StepBatches:
    """Makes the batches that update a step's tasklets, and those that read its parameters back.

    Args:
        layout: The partition.
        places: The current places of the extents, and those to which the step writes.
        plan: The step's plan.
        updates: The scalars that update each parameter.
        master_dtype: Dtype of parameters that serve as masters or as their upper halves; None means none do.
        last_use: Whether the update is the last use of the gradients.

    Attributes:
        last_use: As above, for gradients that later calls of :meth:`take_gradients` name.
    """

    _chosen: tuple[Updates, list[Piece]]

    def __init__(
        self,
        layout: PartitionLayout,
        places: Places,
        plan: StepPlan,
        updates: Updates,
        *,
        master_dtype: native.DType | None,
        last_use: bool,
    ) -> None:
        self._layout = layout
        self._places = places
        self._gradients = FlatMemory(layout, plan.gradients)
        self._compressed = plan.compressed
        self._loss_scale = plan.loss_scale
        self._master_dtype = master_dtype
        self._window = plan.window
        self._windows: dict[int, native.GradientWindow | None] = {}
        self._link, self._arrived = plan.link, plan.arrived
        self._points: dict[int, Sequence[native.ReadyPoint]] = {}
        self.last_use = last_use
        # By tasklet index, because the same batch may be made a second time after an interrupt.
        self._sent: dict[int, native.Tasklet] = {}
        self.choose(updates)

    def choose(self, updates: Updates) -> None:
        """Set the scalars of all later batches. Another thread may be making a batch meanwhile."""
        self._chosen = updates, cut(self._layout, spans_of(self._layout, updates.keys))

    @property
    def updates(self) -> Updates:
        """The scalars that update each parameter."""
        return self._chosen[0]

    @property
    def pieces(self) -> list[Piece]:
        """The partition, cut by scalars and tasklets; a piece's key is its index into ``updates.steps``."""
        return self._chosen[1]

    @property
    def tasklets(self) -> list[int]:
        """Indices of the tasklets that are updated, in partition order."""
        return tasklets_in(piece for piece in self.pieces if piece.key >= 0)

    @property
    def numel(self) -> int:
        """Number of elements that are updated."""
        return sum(piece.end - piece.begin for piece in self.pieces if piece.key >= 0)

    def take_gradients(self, tasklets: Sequence[int]) -> None:
        """Record that the step will use the gradients of these tasklets and replace their parameters.

        The host no longer uses either. Gradients may still be on their way from a CUDA device, which may still use the
        parameters, so record what it has been given so far. Gradient memory keeps the gradients until the step has used
        them.
        """
        if self._window is not None:
            self._windows |= {index: self._window(index, self.last_use) for index in tasklets}
        points = [*(self._link.points() if self._link else ()), *(self._arrived() if self._arrived else ())]
        if points:
            self._points |= dict.fromkeys(tasklets, points)

    def update(self, outputs: Memory, tasklets: Sequence[int]) -> Iterable[native.Batch]:
        """Make the batch that updates these tasklets, in parts."""
        (updates, pieces), gradients, compressed = self._chosen, self._gradients, self._compressed
        master_in_parameter = outputs.keeps_parameters and outputs.dtype == self._master_dtype

        def segment(offset: int, piece: Piece) -> native.Segment:
            updated = piece.key >= 0
            return native.Segment(
                offset=offset,
                numel=piece.end - piece.begin,
                step=piece.key,
                gradient=gradients.address(piece) if updated else 0,
                gradient_dtype=gradients.dtype,
                # A master stored in the parameter goes to storage with its tasklet even where nothing is updated.
                parameter=outputs.address(piece) if updated or master_in_parameter else 0,
                parameter_dtype=outputs.dtype,
            )

        worked = [
            self._places.tasklet(
                self._layout,
                index,
                segments,
                master_in_parameter=master_in_parameter,
                compression=Compression() if compressed is None else compressed.of(index),
                gradient=self._windows.get(index),
            )
            for index, segments in segments_of(self._layout, pieces, tasklets, segment=segment)
        ]
        batch = native.Batch(
            native.Operation.UPDATE,
            worked,
            updates.steps,
            outputs.stream,
            codec=None if compressed is None else compressed.codec,
            residual_scale=self._loss_scale,
            ready=self._points_of(tasklets),
            writes_back=self._places.writes_back,
            slot_bytes=0 if outputs.stream is None else self._layout.extents.tasklet_numel * DTYPE_BYTES[outputs.dtype],
        )
        if compressed is None:
            return [batch]
        if compressed.residual is not None:
            self._sent |= {tasklet.index: tasklet for tasklet in batch.tasklets}
        return compressed.encoded(batch)

    def _points_of(self, tasklets: Sequence[int]) -> list[native.ReadyPoint]:
        """Return the distinct points that must be reached before these tasklets are computed."""
        distinct = {id(points): points for points in map(self._points.get, tasklets) if points is not None}
        return list(chain.from_iterable(distinct.values()))

    def read_back(self, outputs: Memory, tasklets: Sequence[int]) -> Iterable[native.Batch]:
        """Make the batch that reads the current masters of updated parameters back into the parameters."""
        return [read_back_batch(self._layout, self.pieces, tasklets, self._places, outputs=outputs)]

    @property
    def has_residual(self) -> bool:
        """Whether :meth:`feed_back` changes a residual; the answer is the same on all ranks."""
        return self._compressed is not None and self._compressed.residual is not None

    def feed_back(self) -> None:
        """Store the unsent part of the gradients as the residual, after the commit on all ranks.

        Raises:
            StorageError: The residual cannot be stored; no residual has changed.
        """
        if self._compressed is not None:
            self._compressed.feed_back(list(self._sent.values()), scale=self._loss_scale)
