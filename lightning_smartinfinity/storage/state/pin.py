"""Keeps the places of a generation from being written to while somebody reads them beside the next generations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lightning_smartinfinity.storage.spread import Occupied
from lightning_smartinfinity.storage.state.commit_record import CommitRecord

__all__ = ["Pin"]


class Pin:
    """The places of one generation, which no later one takes until they are released.

    One thread may release them while another begins steps: a step that sees a release late leaves the place alone.

    Args:
        record: What was committed.

    Attributes:
        record: What was committed: the generation and the places of its extents.
    """

    def __init__(self, record: CommitRecord) -> None:
        self.record = record
        self._held = np.ones(len(record.tasklet_generations), np.bool_)

    @property
    def occupied(self) -> Occupied:
        """The places that are still held."""
        return Occupied(self.record.placement, self._held.copy())

    def release(self, tasklets: Iterable[int]) -> None:
        """Give the places of these tasklets up. They may be overwritten from now on."""
        self._held[list(tasklets)] = False

    def release_all(self) -> None:
        """Give all places up."""
        self._held[:] = False
