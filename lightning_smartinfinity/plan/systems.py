"""The update of each system, begun in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from lightning_smartinfinity.plan.handler import Route, tasklets_of_device, update_on_cards, update_on_host
from lightning_smartinfinity.plan.hardware import Machine
from lightning_smartinfinity.plan.published import smart_update, zero_infinity
from lightning_smartinfinity.plan.virtual_time import Event, Simulation
from lightning_smartinfinity.plan.wiring import HostPaths, Lane, connect
from lightning_smartinfinity.plan.workload import Workload

__all__ = ["BEGIN", "Run", "System", "Update"]


class System(Enum):
    """Who updates."""

    ZERO_INFINITY = "zero-infinity"
    """The host, over a RAID0 of the devices."""
    SMART_UPDATE = "su"
    """Accelerators, one action after the other (SU)."""
    PUBLISHED = "su+o"
    """Accelerators by the published handler (SU+O; with compression SU+O+C)."""
    CARDS = "smartssd"
    """Accelerators by this package's handler."""
    HOST = "host"
    """The host by this package's handler, each device for itself."""


@dataclass(frozen=True)
class Run:
    """A simulation with all it takes.

    Args:
        simulation: Its time.
        lanes: Of the devices that are simulated: all of them, or one that stands for all.
        host: The host's.
        machine: The machine.
        workload: What is updated.
        route: Of the gradients to this package's accelerators.
    """

    simulation: Simulation
    lanes: list[Lane]
    host: HostPaths
    machine: Machine
    workload: Workload
    route: Route

    @classmethod
    def of(cls, machine: Machine, workload: Workload, system: System, route: Route) -> Run:
        """One device stands for all where each does the same for itself."""
        lanes, host = connect(machine, machine.num_devices if system is System.HOST else 1)
        return cls(Simulation(), lanes, host, machine, workload, route)

    @property
    def share(self) -> int:
        """Parameters of each device."""
        return -(-self.workload.numel // self.machine.num_devices)


@dataclass(frozen=True)
class Update:
    """One that has begun.

    Args:
        finished: All is written.
        parameters_out: By tasklet, in the order of use; empty: all at the end.
        numel: Parameters of the devices that are simulated.
    """

    finished: Event
    parameters_out: list[Event]
    numel: int


def _on_cards(run: Run) -> Update:
    tasklets = tasklets_of_device(run.workload.simulated_card_layout(run.machine.num_devices), 0)
    update = update_on_cards(
        run.simulation,
        run.lanes[0],
        run.host,
        tasklets,
        workload=run.workload,
        route=run.route,
        depth=run.machine.device.depth,
    )
    return Update(update.finished, update.parameters_out, sum(tasklet.numel for tasklet in tasklets))


def _on_host(run: Run) -> Update:
    layout, depth = run.workload.host_layout(run.machine.num_devices), run.machine.device.depth
    update = update_on_host(run.simulation, run.lanes, run.host, layout, workload=run.workload, depth=depth)
    return Update(update.finished, update.parameters_out, run.workload.numel)


def _zero_infinity(run: Run) -> Update:
    update = zero_infinity(run.simulation, run.lanes[0], workload=run.workload, numel=run.share)
    return Update(run.simulation.start(update), [], run.share)


def _su(run: Run) -> Update:
    return _smart_update(run, optimized=False)


def _su_o(run: Run) -> Update:
    return _smart_update(run, optimized=True)


def _smart_update(run: Run, *, optimized: bool) -> Update:
    update = smart_update(
        run.simulation, run.lanes, run.host, workload=run.workload, numel=run.share, optimized=optimized
    )
    return Update(run.simulation.start(update), [], run.share)


BEGIN: Mapping[System, Callable[[Run], Update]] = MappingProxyType(
    {
        System.ZERO_INFINITY: _zero_infinity,
        System.SMART_UPDATE: _su,
        System.PUBLISHED: _su_o,
        System.CARDS: _on_cards,
        System.HOST: _on_host,
    }
)
"""Begins a system's update at time 0."""
