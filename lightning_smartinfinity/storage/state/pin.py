"""Keeps the places of a generation from being overwritten while they are read during later steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lightning_smartinfinity.storage.spread import Occupied
from lightning_smartinfinity.storage.state.commit_record import CommitRecord

__all__ = ["Pin"]


class Pin:
    """The places of one generation, which no later generation overwrites until they are released.

    One thread may release places while another begins steps: a step that misses a release only leaves the place alone.

    Args:
        record: The commit record of the generation.

    Attributes:
        record: The commit record: the generation and the places of its extents.
    """

    def __init__(self, record: CommitRecord) -> None:
        self.record = record
        self._held = np.ones(len(record.tasklet_generations), np.bool_)

    @property
    def occupied(self) -> Occupied:
        """The places that are still held."""
        return Occupied(self.record.placement, self._held.copy())

    def release(self, tasklets: Iterable[int]) -> None:
        """Release the places of these tasklets. They may be overwritten from now on."""
        self._held[list(tasklets)] = False

    def release_all(self) -> None:
        """Release all places."""
        self._held[:] = False
