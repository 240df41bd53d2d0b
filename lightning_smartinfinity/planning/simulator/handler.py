"""This package's transfer handler in virtual time; the native core's schedule of real steps orders its transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import numpy as np

from lightning_smartinfinity.native import TransferSchedule
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout, TaskletSlice
from lightning_smartinfinity.planning.simulator.virtual_time import Event, Path, Pool, Process, Simulation
from lightning_smartinfinity.planning.simulator.wiring import HostPaths, Lane
from lightning_smartinfinity.planning.simulator.workload import Workload

__all__ = [
    "CARD_COMPUTE_THREADS",
    "MOST_FEED_BACK_THREADS",
    "Route",
    "SimulatedBatch",
    "tasklets_of_device",
    "update_on_cards",
    "update_on_host",
]


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


CARD_COMPUTE_THREADS = 2
"""Threads that wait for a card, as in devices/smartssd/device.py; a card has one I/O thread for each buffer."""

MOST_FEED_BACK_THREADS = 8
"""Most threads of a machine that update residuals, as in compressed_gradients.py: more are no faster."""


class Route(Enum):
    """How gradients reach an accelerator."""

    HOST = "host"
    """Gradients come from host memory, within the update."""
    STORAGE = "storage"
    """Gradients go from host memory to the device's SSD and from there to the accelerator, within the update."""
    BACKWARD = "backward"
    """Gradients come from the device's SSD, where backward wrote them, as in the paper."""


def update_on_cards(
    simulation: Simulation,
    lane: Lane,
    host: HostPaths,
    tasklets: Sequence[TaskletSlice],
    *,
    workload: Workload,
    route: Route,
    depth: int,
) -> SimulatedBatch:
    """Start the update of a device by its accelerator.

    Args:
        simulation: The simulation.
        lane: Paths of the device.
        host: Paths of the host.
        tasklets: Tasklets on the device.
        workload: Data of the step.
        route: How gradients reach the accelerator.
        depth: Number of requests that the device processes at the same time.
    """
    # Each buffer has an I/O thread.
    io, compute = Pool(simulation, min(depth, workload.num_buffers)), Pool(simulation, CARD_COMPUTE_THREADS)
    # The card runs one kernel at a time, and one transfer at a time in each direction.
    downward, accelerator, upward = (Pool(simulation, 1) for _ in range(3))
    gradients = workload.gradients
    kernel = lane.kernel_for(gradients)

    def read(number: int) -> Process:
        numel = tasklets[number].numel
        parts = [workload.array_bytes * numel] + [gradients.nbytes(numel)] * (route is Route.BACKWARD)
        yield from [io.push(_in_turn(simulation, (lane.read, part))) for part in parts]

    def on_card(number: int) -> Process:
        numel = tasklets[number].numel
        if gradients.compressed and route is not Route.BACKWARD:
            yield simulation.work(host.select(), numel)
        yield downward.push(_in_turn(simulation, *_gradient_way(lane, route, gradients.nbytes(numel))))
        # The kernel's status is cleared before the run and read after it. These transfers are tiny, but they queue as
        # well.
        yield downward.push(_in_turn(simulation))
        yield accelerator.push(_in_turn(simulation, (kernel, workload.kernel_bytes * numel)))
        yield upward.push(_in_turn(simulation))
        yield upward.push(_in_turn(simulation, (lane.up, workload.parameter_bytes * numel)))
        yield simulation.work(host.receive, numel)

    def compute_on_card(number: int) -> Process:
        yield compute.push(on_card(number))

    def write(number: int) -> Process:
        yield io.push(_in_turn(simulation, (lane.write, workload.array_bytes * tasklets[number].numel)))

    return SimulatedBatch(
        simulation,
        num_tasklets=len(tasklets),
        num_buffers=workload.num_buffers,
        works={"read": read, "compute": compute_on_card, "write": write},
    )


def update_on_host(
    simulation: Simulation,
    lanes: Sequence[Lane],
    host: HostPaths,
    layout: PartitionLayout,
    *,
    workload: Workload,
    depth: int,
) -> SimulatedBatch:
    """Start the update of all devices by one thread of the host, with one ring.

    Args:
        simulation: The simulation.
        lanes: Paths of each device.
        host: Paths of the host.
        layout: Layout of all tasklets.
        workload: Data of the step.
        depth: Number of requests that a device processes at the same time.
    """
    queues = [Pool(simulation, depth) for _ in lanes]
    compute = Pool(simulation, 1)
    assigned = layout.extents.first_assigned
    tasklets = layout.tasklets

    def read(number: int) -> Process:
        tasklet = tasklets[number]
        nbytes = tasklet.extent_bytes - workload.skipped_bytes(tasklet.numel)
        device = assigned[number]
        yield queues[device].push(_in_turn(simulation, (lanes[device].load, nbytes)))

    def update(number: int) -> Process:
        yield compute.push(_in_turn(simulation, (host.update, tasklets[number].numel)))

    def write(number: int) -> Process:
        device = assigned[number]
        yield queues[device].push(_in_turn(simulation, (lanes[device].store, tasklets[number].extent_bytes)))

    return SimulatedBatch(
        simulation,
        num_tasklets=len(tasklets),
        num_buffers=workload.num_buffers,
        works={"read": read, "compute": update, "write": write},
    )


def tasklets_of_device(layout: PartitionLayout, device: int) -> list[TaskletSlice]:
    """Return the tasklets that are assigned to a device."""
    return [layout.tasklets[index] for index in np.flatnonzero(layout.extents.first_assigned == device)]


def _gradient_way(lane: Lane, route: Route, nbytes: float) -> list[tuple[Path, float]]:
    """Return the paths of a tasklet's gradient within the update, each with its bytes."""
    match route:
        case Route.HOST:
            return [(lane.down, nbytes)]
        case Route.STORAGE:
            return [(lane.store, nbytes), (lane.read, nbytes)]
        case Route.BACKWARD:
            return []


def _in_turn(simulation: Simulation, *works: tuple[Path, float]) -> Process:
    for path, units in works:
        yield simulation.work(path, units)
