"""Tasklets that move to another storage folder at every step, whatever is measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity.devices import FolderTraffic
from lightning_smartinfinity.pipeline.layout.balance import Balance
from tests.pipeline.harness import Run


class Wandering(Balance):
    """A balance that asks for random numbers of tasklets."""

    def __init__(self, num_folders: int, seed: int = 0) -> None:
        super().__init__(num_folders)
        self._random = np.random.default_rng(seed)

    def end(self, counters: Sequence[FolderTraffic]) -> None:
        """Ignore the measurements."""

    def better(self, counts: Sequence[int]) -> NDArray[np.int64]:
        return self._random.multinomial(sum(counts), self._random.dirichlet([1.0] * len(counts)))


def wander(run: Run, *, seed: int = 0) -> None:
    """Let tasklets move at every following step if there are several folders."""
    if run.case.num_devices > 1:
        run.handler._balance = Wandering(run.case.num_devices, seed)
