"""Keeps the places of a generation from being written to while somebody reads them beside the next generations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.store.record import CommitRecord
from lightning_smartinfinity.store.spread import Occupied, Placement

__all__ = ["Pin"]


class Pin:
    """The places of one generation, which no later one takes until they are released.

    One thread may release them while another begins steps: a step that sees a release late leaves the place alone.

    Args:
        record: What was committed.
    """

    def __init__(self, record: CommitRecord) -> None:
        self._record = record
        self._held = np.ones(len(record.tasklet_generations), np.bool_)

    @property
    def generation(self) -> int:
        """The generation."""
        return self._record.generation

    @property
    def placement(self) -> Placement:
        """The places of its extents."""
        return self._record.placement

    @property
    def tasklet_generations(self) -> NDArray[np.int64]:
        """int64[num_tasklets]: generation of each extent."""
        return self._record.tasklet_generations

    @property
    def occupied(self) -> Occupied:
        """The places that are still held."""
        return Occupied(self._record.placement, self._held.copy())

    def release(self, tasklets: Iterable[int]) -> None:
        """Give the places of these tasklets up. They may be overwritten from now on."""
        self._held[list(tasklets)] = False

    def release_all(self) -> None:
        """Give all places up."""
        self._held[:] = False
