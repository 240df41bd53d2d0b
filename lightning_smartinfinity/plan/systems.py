"""Starts the update of each system in virtual time."""

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
class Run:
    """A simulation with everything that it needs.

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
    def of(cls, machine: Machine, workload: Workload, system: System, route: Route) -> Run:
        """Make a run in which one device represents all if every device does the same on its own."""
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
        finished: Event that happens when all is written.
        parameters_out: Event of each tasklet, in the order of use; empty if all parameters come at the end.
        numel: Parameters of the simulated devices.
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
"""Function that starts a system's update at time 0."""
