"""The native core's transfer schedule in virtual time: the state machine that orders a real step orders this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_smartinfinity.native import TransferSchedule
from lightning_smartinfinity.plan.virtual_time import Event, Process, Simulation

__all__ = ["ScheduleRun"]

Work = Callable[[int], Process]


class ScheduleRun:
    """A batch of one pipeline, as ``TransferLoop`` works it: what may start is started, whenever something has ended.

    Args:
        simulation: Its time.
        num_tasklets: Of the batch.
        num_buffers: Of the ring.
        works: Of each action that there is, ``"read"``, ``"compute"`` or ``"write"``: what has to be done for a
            tasklet, by its number.
    """

    def __init__(
        self, simulation: Simulation, *, num_tasklets: int, num_buffers: int, works: Mapping[str, Work]
    ) -> None:
        self._simulation = simulation
        self._schedule = TransferSchedule(num_tasklets, num_buffers, reads="read" in works, writes="write" in works)
        self._works = works
        self.started: list[tuple[str, int]] = []
        """Actions and their tasklets, in the order of their start."""
        self.parameters_out = [simulation.event() for _ in range(num_tasklets)]
        """By tasklet: it has been computed."""
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
