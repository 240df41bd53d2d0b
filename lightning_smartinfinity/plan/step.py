"""A whole training step in virtual time: forward, backward and the update of any of the systems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.plan.handler import Route, tasklets_of_device, update_on_cards, update_on_host
from lightning_smartinfinity.plan.machine import Machine
from lightning_smartinfinity.plan.published import smart_update, zero_infinity
from lightning_smartinfinity.plan.virtual_time import Event, Process, Simulation
from lightning_smartinfinity.plan.wiring import HostPaths, Lane, connect
from lightning_smartinfinity.plan.workload import Workload

__all__ = ["Overlap", "StepTime", "System", "Traffic", "simulate_step"]

_NUM_LAYERS = 32


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


class Overlap(Enum):
    """What the update runs beside."""

    NONE = "none"
    FORWARD = "forward"
    """The next forward, whose layers wait for their own parameters."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one step over all devices.

    Args:
        shared_down: Host to devices.
        shared_up: Devices to host.
        internal_read: SSD to accelerator.
        internal_write: Accelerator to SSD.
    """

    shared_down: float
    shared_up: float
    internal_read: float
    internal_write: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step in the steady state. With an overlap the parts are more than the whole.

    Args:
        forward: Of the GPU, without waiting.
        backward: With storing gradients.
        update: From its start until all is written.
        step: From one step to the next.
        traffic: What was moved.
    """

    forward: float
    backward: float
    update: float
    step: float
    traffic: Traffic


@dataclass(frozen=True)
class _Run:
    """A simulation with all it takes."""

    simulation: Simulation
    lanes: list[Lane]
    host: HostPaths
    machine: Machine
    workload: Workload

    @property
    def numel_per_device(self) -> int:
        return -(-self.workload.numel // self.machine.num_devices)


@dataclass(frozen=True)
class _Update:
    """One under way.

    Args:
        finished: All is written.
        parameters_out: By tasklet, in the order of use; empty: with ``finished``.
    """

    finished: Event
    parameters_out: list[Event]


def simulate_step(
    machine: Machine,
    workload: Workload,
    system: System,
    *,
    overlap: Overlap = Overlap.NONE,
    route: Route = Route.HOST,
) -> StepTime:
    """One step in the steady state.

    Args:
        machine: The machine.
        workload: What is updated.
        system: Who updates.
        overlap: Of :attr:`System.CARDS` and :attr:`System.HOST`; the others have none.
        route: Of gradients with :attr:`System.CARDS`; the published systems have :attr:`Route.BACKWARD`.

    Raises:
        ConfigError: They do not go together.
    """
    _require_possible(machine, workload, system, overlap)
    # One device stands for all where each does the same for itself.
    lanes, host = connect(machine, machine.num_devices if system is System.HOST else 1)
    run = _Run(Simulation(), lanes, host, machine, workload)
    stores_gradients = system in (System.ZERO_INFINITY, System.SMART_UPDATE, System.PUBLISHED) or (
        system is System.CARDS and route is Route.BACKWARD
    )
    marks: dict[str, float] = {}
    run.simulation.start(_step(run, _UPDATES[system], route, overlap, stores_gradients, marks))
    step = run.simulation.run()
    forward = machine.gpu.forward * workload.numel
    return StepTime(forward=forward, step=step, traffic=_traffic(run), **marks)


def _require_possible(machine: Machine, workload: Workload, system: System, overlap: Overlap) -> None:
    on_accelerator = system in (System.SMART_UPDATE, System.PUBLISHED, System.CARDS)
    if on_accelerator and machine.device.kernel is None:
        raise ConfigError(f"System {system.value!r} needs accelerators.", "Give Device(kernel=...) a rate.")
    if workload.state_format != "fp32" and system is not System.HOST:
        raise ConfigError(
            f"System {system.value!r} has no state format {workload.state_format!r}.", "Use 'fp32', or the host."
        )
    if overlap is not Overlap.NONE and system not in (System.CARDS, System.HOST):
        raise ConfigError(f"System {system.value!r} overlaps nothing.", "Use overlap 'none'.")
    if workload.gradients.compressed and system in (System.ZERO_INFINITY, System.HOST):
        raise ConfigError(
            f"System {system.value!r} has no compressed gradients to move.", "Its gradients cross no shared channel."
        )


def _step(
    run: _Run,
    begin: Callable[[_Run, Route], _Update],
    route: Route,
    overlap: Overlap,
    stores: bool,
    marks: dict[str, float],
) -> Process:
    """In the order update, forward, backward: with an overlap the update is that of the step before."""
    simulation = run.simulation
    update = begin(run, route)
    timed = simulation.start(_timed(simulation, update.finished, marks))
    if overlap is Overlap.NONE:
        yield timed
    yield from _forward(run, update)
    began = simulation.now
    yield from _backward(run, stores)
    marks["backward"] = simulation.now - began
    yield timed


def _timed(simulation: Simulation, finished: Event, marks: dict[str, float]) -> Process:
    yield finished
    marks["update"] = simulation.now


def _forward(run: _Run, update: _Update) -> Process:
    """Layer by layer, each as soon as its parameters are there."""
    out = update.parameters_out or [update.finished]
    waited = 0
    for layer in range(1, _NUM_LAYERS + 1):
        needed = -(-layer * len(out) // _NUM_LAYERS)
        while waited < needed:
            yield out[waited]
            waited += 1
        yield run.simulation.work(run.host.forward, run.workload.numel / _NUM_LAYERS)


def _backward(run: _Run, stores_gradients: bool) -> Process:
    """Gradients are stored in their turn: the published seconds of backward are the sum of both."""
    gradients = run.workload.gradients
    yield run.simulation.work(run.host.backward, run.workload.numel)
    if gradients.compressed:
        yield run.simulation.work(run.host.top_k, run.workload.numel)
    if stores_gradients:
        nbytes = gradients.nbytes(run.numel_per_device)
        yield from [run.simulation.work(lane.store, nbytes) for lane in run.lanes]


def _on_cards(run: _Run, route: Route) -> _Update:
    tasklets = tasklets_of_device(run.workload.card_layout(run.machine.num_devices), 0)
    done = update_on_cards(run.simulation, run.lanes[0], run.host, tasklets, workload=run.workload, route=route)
    return _Update(done.finished, done.parameters_out)


def _on_host(run: _Run, route: Route) -> _Update:
    layout = run.workload.host_layout(run.machine.num_devices)
    done = update_on_host(
        run.simulation, run.lanes, run.host, layout, workload=run.workload, depth=run.machine.device.depth
    )
    return _Update(done.finished, done.parameters_out)


def _zero_infinity(run: _Run, route: Route) -> _Update:
    update = zero_infinity(run.simulation, run.lanes[0], run.host, workload=run.workload, numel=run.numel_per_device)
    return _Update(run.simulation.start(update), [])


def _smart_update(run: _Run, route: Route, *, optimized: bool = False) -> _Update:
    update = smart_update(
        run.simulation,
        run.lanes,
        run.host,
        workload=run.workload,
        numel=run.numel_per_device,
        optimized=optimized,
    )
    return _Update(run.simulation.start(update), [])


def _published(run: _Run, route: Route) -> _Update:
    return _smart_update(run, route, optimized=True)


_UPDATES: dict[System, Callable[[_Run, Route], _Update]] = {
    System.ZERO_INFINITY: _zero_infinity,
    System.SMART_UPDATE: _smart_update,
    System.PUBLISHED: _published,
    System.CARDS: _on_cards,
    System.HOST: _on_host,
}


def _traffic(run: _Run) -> Traffic:
    copies = run.machine.num_devices // len(run.lanes)

    return Traffic(
        shared_down=copies * sum(lane.down.done + lane.store.done for lane in run.lanes),
        shared_up=copies * sum(lane.up.done + lane.load.done for lane in run.lanes),
        internal_read=copies * sum(lane.read.done for lane in run.lanes),
        internal_write=copies * sum(lane.write.done for lane in run.lanes),
    )
