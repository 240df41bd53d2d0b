"""Smart-Infinity's handler as published, ZeRO-Infinity on RAID0, and this package's, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from lightning_smartinfinity.planning.simulator.handler import (
    Route,
    tasklets_of_device,
    update_on_cards,
    update_on_host,
)
from lightning_smartinfinity.planning.simulator.hardware import Machine
from lightning_smartinfinity.planning.simulator.virtual_time import Event, Process, Simulation
from lightning_smartinfinity.planning.simulator.wiring import HostPaths, Lane, connect
from lightning_smartinfinity.planning.simulator.workload import ENOUGH_TASKLETS, Workload

__all__ = [
    "BEGIN",
    "SimulatedStep",
    "System",
    "Update",
    "smart_update",
    "zero_infinity",
]


_TASKLET_NUMEL = 10_000_000  # per device; since tasklets run one after the other, the size hardly matters
_SUB_GROUP_NUMEL = 100_000_000
_MASTER_BYTES = 4


def smart_update(
    simulation: Simulation, lanes: Sequence[Lane], host: HostPaths, *, workload: Workload, numel: int, optimized: bool
) -> Process:
    """Update in rounds of one tasklet per device, with a barrier after each round.

    A tasklet's reads, kernel and writes run one after the other. Parameters are written first, and sent to the host
    before the other arrays are written. With ``optimized``, the next tasklet's gradient is read during that write.
    Backward has already written gradients to the SSDs.

    Args:
        simulation: The simulation.
        lanes: Paths of each device.
        host: Paths of the host.
        workload: Data of the step.
        numel: Parameters of each device.
        optimized: Whether the published handler is used (SU+O) or not (SU).
    """
    sizes = _sizes(numel, _TASKLET_NUMEL)
    gradients = [workload.gradients.nbytes(size) for size in sizes]
    none = [0.0] * len(sizes)
    alone, beside = (none, [*gradients[1:], 0.0]) if optimized else (gradients, none)
    if optimized:
        yield from [simulation.work(lane.read, gradients[0]) for lane in lanes]
    for size, before, behind in zip(sizes, alone, beside, strict=True):
        tasklets = [_tasklet(simulation, lane, host, workload, size, (before, behind)) for lane in lanes]
        yield from [simulation.start(tasklet) for tasklet in tasklets]


def _tasklet(
    simulation: Simulation, lane: Lane, host: HostPaths, workload: Workload, numel: int, gradients: tuple[float, float]
) -> Process:
    """Update one tasklet of a device; ``gradients`` are bytes read before the update, and during its last write."""
    before, beside = gradients
    arrays, master = workload.array_bytes * numel, _MASTER_BYTES * numel
    yield simulation.work(lane.read, arrays + before)
    yield simulation.work(lane.kernel_for(workload.gradients), workload.kernel_bytes * numel)
    yield simulation.work(lane.write, master)
    yield simulation.work(lane.up, workload.parameter_bytes * numel)
    yield simulation.work(host.receive, numel)
    yield from [simulation.work(lane.write, arrays - master), simulation.work(lane.read, beside)]


def zero_infinity(simulation: Simulation, lane: Lane, *, workload: Workload, numel: int) -> Process:
    """Update on the host's CPU over a RAID0 of all devices: read, update and write one sub-group after the other.

    The published seconds do not show the CPU's time separately; the channel's rate, fitted to them, includes it.

    Args:
        simulation: The simulation.
        lane: Paths of one device, which represents all devices, since stripes are equal.
        workload: Data of the step.
        numel: Parameters of each device.
    """
    for size in _sizes(numel, _SUB_GROUP_NUMEL):
        yield simulation.work(lane.load, workload.array_bytes * size + workload.gradients.nbytes(size))
        yield simulation.work(lane.store, workload.array_bytes * size)


def _sizes(numel: int, usual: int) -> list[int]:
    """Return the sizes of pieces that run one after the other; pieces of large models are larger than usual."""
    size = max(usual, -(-numel // ENOUGH_TASKLETS))
    return [min(size, numel - begin) for begin in range(0, numel, size)]


class System(Enum):
    """The systems that can update."""

    ZERO_INFINITY = "zero-infinity"
    """The host updates, over a RAID0 of the devices."""
    SMART_UPDATE = "su"
    """Accelerators update, one action after the other (SU)."""
    PUBLISHED = "su+o"
    """Accelerators update through the published handler (SU+O; with compression SU+O+C)."""
    CARDS = "smartssd"
    """Accelerators update through this package's handler."""
    HOST = "host"
    """The host updates through this package's handler, with each device on its own."""


@dataclass(frozen=True)
class SimulatedStep:
    """The simulation of a step and its inputs.

    Args:
        simulation: The simulation.
        lanes: Paths of the simulated devices: all devices, or one that represents all.
        host: Paths of the host.
        machine: The machine.
        workload: Data of the update.
        route: How gradients reach this package's accelerators.
    """

    simulation: Simulation
    lanes: list[Lane]
    host: HostPaths
    machine: Machine
    workload: Workload
    route: Route

    @classmethod
    def of(cls, machine: Machine, workload: Workload, system: System, route: Route) -> SimulatedStep:
        """Make a step; one device represents all, except for :attr:`System.HOST`, where they share a ring."""
        lanes, host = connect(machine, machine.num_devices if system is System.HOST else 1)
        return cls(Simulation(), lanes, host, machine, workload, route)

    @property
    def share(self) -> int:
        """Parameters of each device."""
        return -(-self.workload.numel // self.machine.num_devices)


@dataclass(frozen=True)
class Update:
    """An update that has started.

    Args:
        finished: Event that is set when all writes are done.
        parameters_out: Event of each tasklet, in the order of use; empty if all parameters arrive at the end.
        numel: Parameters of the simulated devices.
    """

    finished: Event
    parameters_out: list[Event]
    numel: int


def _on_cards(step: SimulatedStep) -> Update:
    tasklets = tasklets_of_device(step.workload.simulated_card_layout(step.machine.num_devices), 0)
    update = update_on_cards(
        step.simulation,
        step.lanes[0],
        step.host,
        tasklets,
        workload=step.workload,
        route=step.route,
        depth=step.machine.device.depth,
    )
    return Update(update.finished, update.parameters_out, sum(tasklet.numel for tasklet in tasklets))


def _on_host(step: SimulatedStep) -> Update:
    layout, depth = step.workload.host_layout(step.machine.num_devices), step.machine.device.depth
    update = update_on_host(step.simulation, step.lanes, step.host, layout, workload=step.workload, depth=depth)
    return Update(update.finished, update.parameters_out, step.workload.numel)


def _zero_infinity(step: SimulatedStep) -> Update:
    update = zero_infinity(step.simulation, step.lanes[0], workload=step.workload, numel=step.share)
    return Update(step.simulation.start(update), [], step.share)


def _su(step: SimulatedStep) -> Update:
    return _smart_update(step, optimized=False)


def _su_o(step: SimulatedStep) -> Update:
    return _smart_update(step, optimized=True)


def _smart_update(step: SimulatedStep, *, optimized: bool) -> Update:
    update = smart_update(
        step.simulation, step.lanes, step.host, workload=step.workload, numel=step.share, optimized=optimized
    )
    return Update(step.simulation.start(update), [], step.share)


BEGIN: Mapping[System, Callable[[SimulatedStep], Update]] = MappingProxyType(
    {
        System.ZERO_INFINITY: _zero_infinity,
        System.SMART_UPDATE: _su,
        System.PUBLISHED: _su_o,
        System.CARDS: _on_cards,
        System.HOST: _on_host,
    }
)
"""Function that starts a system's update at time 0."""
