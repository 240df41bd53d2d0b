"""Makes the batches of one step."""

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
        places: The places of the extents and those to which the step writes.
        plan: The step's plan.
        updates: The scalars with which each parameter is updated.
        master_dtype: Dtype of parameters that serve as the masters, or as half of them; None means none do.
        last_use: Whether nobody needs gradients after their update.

    Attributes:
        last_use: As above, for the batches that are made from now on.
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
        self._link = plan.link
        self._points: dict[int, Sequence[native.CudaEvent]] = {}
        self.last_use = last_use
        # By tasklet index: after an interrupt, the same batch may be made a second time.
        self._sent: dict[int, native.Tasklet] = {}
        self.choose(updates)

    def choose(self, updates: Updates) -> None:
        """Choose the scalars of all batches made from now on; another thread may be making one."""
        self._chosen = updates, cut(self._layout, spans_of(self._layout, updates.keys))

    @property
    def updates(self) -> Updates:
        """The scalars with which each parameter is updated."""
        return self._chosen[0]

    @property
    def pieces(self) -> list[Piece]:
        """The partition cut by them; the key of a piece is its parameters' index into ``updates.steps``."""
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
        """Note that the step will use the gradients of these tasklets, and replace their parameters.

        The host is done with both. A device may still be about to send the gradients and to use the parameters, and
        the memory of gradients has to keep them until the step comes to them.
        """
        if self._window is not None:
            self._windows |= {index: self._window(index, self.last_use) for index in tasklets}
        if self._link is not None:
            self._points |= dict.fromkeys(tasklets, self._link.points())

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
                # A master that lies in the parameter is written to storage even where nothing is updated.
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
            slot_bytes=0 if outputs.stream is None else self._layout.extents.tasklet_numel * DTYPE_BYTES[outputs.dtype],
        )
        if compressed is None:
            return [batch]
        if compressed.residual is not None:
            self._sent |= {tasklet.index: tasklet for tasklet in batch.tasklets}
        return compressed.encoded(batch)

    def _points_of(self, tasklets: Sequence[int]) -> list[native.CudaEvent]:
        """Return the points behind what a device does with these tasklets, each once."""
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
        """Store what compression left out of the gradients as the residual, after the commit on all ranks.

        Raises:
            StorageError: It cannot be stored; no residual has changed.
        """
        if self._compressed is not None:
            self._compressed.feed_back(list(self._sent.values()), scale=self._loss_scale)
