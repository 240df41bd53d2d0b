"""Runs the native core's transfer schedule, which also orders real steps, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_smartinfinity.native import TransferSchedule
from lightning_smartinfinity.planning.simulator.virtual_time import Event, Process, Simulation

__all__ = ["SimulatedBatch"]

Work = Callable[[int], Process]


class SimulatedBatch:
    """A batch that runs as in ``native.Pipeline``: whenever an action ends, all ready actions start.

    Args:
        simulation: The simulation.
        num_tasklets: Number of tasklets in the batch.
        num_buffers: Number of buffers in the ring.
        works: For each action (``"read"``, ``"compute"``, ``"write"``), the function that makes its process from a
            tasklet's number. An action without a function is skipped.
    """

    def __init__(
        self, simulation: Simulation, *, num_tasklets: int, num_buffers: int, works: Mapping[str, Work]
    ) -> None:
        self._simulation = simulation
        self._schedule = TransferSchedule(num_tasklets, num_buffers, reads="read" in works, writes="write" in works)
        self._works = works
        self.started: list[tuple[str, int]] = []
        """Actions and their tasklets, in the order in which they started."""
        self.parameters_out = [simulation.event() for _ in range(num_tasklets)]
        """Event of each tasklet, which is set when the tasklet has been computed."""
        self.finished: Event = simulation.event()
        simulation.soon(self._start_ready)

    def _start_ready(self) -> None:
        for action, tasklet, _ in self._schedule.next():
            self.started.append((action, tasklet))
            self._simulation.start(self._work(action, tasklet))
        if self._schedule.finished:
            self.finished.set()

    def _work(self, action: str, tasklet: int) -> Process:
        yield from self._works[action](tasklet)
        self._schedule.done(action, tasklet)
        if action == "compute":
            self.parameters_out[tasklet].set()
        self._start_ready()
