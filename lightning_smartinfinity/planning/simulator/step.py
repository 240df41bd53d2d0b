"""Simulates a whole training step in virtual time: forward, backward and the update of any system."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.hardware import Machine
from lightning_smartinfinity.planning.simulator.systems import BEGIN, SimulatedStep, System, Update
from lightning_smartinfinity.planning.simulator.virtual_time import Event, Process
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.settings.rules import check, instance

__all__ = ["Overlap", "SimulatedTraffic", "StepTime", "System", "simulate_step"]

_NUM_LAYERS = 32
_OURS = (System.CARDS, System.HOST)


class Overlap(Enum):
    """The part of the step that the update overlaps."""

    NONE = "none"
    FORWARD = "forward"
    """The update overlaps the next forward, whose layers wait for their own parameters."""


@dataclass(frozen=True, kw_only=True)
class SimulatedTraffic:
    """Bytes of one step over all devices.

    Args:
        shared_down: Bytes from the host to devices.
        shared_up: Bytes from devices to the host.
        internal_read: Bytes from SSDs to accelerators.
        internal_write: Bytes from accelerators to SSDs.
    """

    shared_down: float
    shared_up: float
    internal_read: float
    internal_write: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step in the steady state. With an overlap, the sum of the parts exceeds the step.

    Args:
        forward: Seconds of the GPU's forward, without waiting.
        backward: Seconds of backward, with storing gradients.
        update: Seconds from the update's start until all writes are done and residuals are stored.
        step: Seconds from one step to the next.
        traffic: Bytes moved.
    """

    forward: float
    backward: float
    update: float
    step: float
    traffic: SimulatedTraffic


def simulate_step(
    machine: Machine,
    workload: Workload,
    system: System,
    *,
    overlap: Overlap = Overlap.NONE,
    route: Route = Route.HOST,
) -> StepTime:
    """Simulate a step in the steady state.

    Args:
        machine: The machine.
        workload: Data of the update.
        system: The system that updates.
        overlap: Overlap of :attr:`System.CARDS` and :attr:`System.HOST`; other systems have no overlap.
        route: Gradients' route for :attr:`System.CARDS`; the published systems use :attr:`Route.BACKWARD`.

    Raises:
        ConfigError: An argument has the wrong type, or arguments contradict each other.
    """
    for name, value, kind in (
        ("machine", machine, Machine),
        ("workload", workload, Workload),
        ("system", system, System),
        ("overlap", overlap, Overlap),
        ("route", route, Route),
    ):
        check("simulate_step", name, value, instance(kind))
    _require_possible(machine, workload, system, overlap)
    step = SimulatedStep.of(machine, workload, system, route)
    update = BEGIN[system](step)
    stores_gradients = system not in _OURS or (system is System.CARDS and route is Route.BACKWARD)
    keeps_rest = system is System.CARDS and workload.gradients.compressed
    marks: dict[str, float] = {}
    timed = step.simulation.start(_timed(step, update.finished, keeps_rest, marks))
    stages = _step(
        step,
        update,
        timed,
        stores_gradients,
        marks,
        forward_waits=overlap is Overlap.NONE,
        # Residuals of these gradients must be stored before the next gradients arrive.
        backward_waits=keeps_rest and machine.host.feed_back > 0,
    )
    step.simulation.start(stages)
    seconds = step.simulation.run()
    forward = machine.gpu.forward * workload.numel
    return StepTime(forward=forward, step=seconds, traffic=_traffic(step, update), **marks)


def _require_possible(machine: Machine, workload: Workload, system: System, overlap: Overlap) -> None:
    on_accelerator = system in (System.SMART_UPDATE, System.PUBLISHED, System.CARDS)
    if on_accelerator and machine.device.kernel is None:
        raise ConfigError(f"System {system.value!r} needs accelerators.", "Give Device(kernel=...) a rate.")
    form = STATE_FORMATS[workload.state_format]
    if not (form.in_place or system is System.HOST or (form.on_cards and system is System.CARDS)):
        raise ConfigError(
            f"System {system.value!r} has no state format {workload.state_format!r}.",
            f"Use {names_where(lambda other: other.in_place)}, or the host.",
        )
    if overlap is not Overlap.NONE and system not in _OURS:
        raise ConfigError(f"System {system.value!r} overlaps nothing.", "Use overlap 'none'.")
    if workload.gradients.compressed and not on_accelerator:
        raise ConfigError(f"System {system.value!r} has no compressed gradients.", "Use Dense gradients.")


def _step(
    step: SimulatedStep,
    update: Update,
    timed: Event,
    stores_gradients: bool,
    marks: dict[str, float],
    *,
    forward_waits: bool,
    backward_waits: bool,
) -> Process:
    """Run update, forward and backward in this order; with an overlap the update is that of the previous step."""
    if forward_waits:
        yield timed
    yield from _forward(step, update)
    if backward_waits:
        yield timed
    began = step.simulation.now
    yield from _backward(step, update, stores_gradients)
    marks["backward"] = step.simulation.now - began
    yield timed


def _timed(step: SimulatedStep, finished: Event, keeps_rest: bool, marks: dict[str, float]) -> Process:
    """Wait for the update, then store the residuals, and record the time."""
    yield finished
    if keeps_rest:
        yield step.simulation.work(step.host.feed_back, step.workload.numel)
    marks["update"] = step.simulation.now


def _forward(step: SimulatedStep, update: Update) -> Process:
    """Compute layer by layer; each layer starts when its parameters are in memory."""
    out = update.parameters_out or [update.finished]
    waited = 0
    for layer in range(1, _NUM_LAYERS + 1):
        needed = -(-layer * len(out) // _NUM_LAYERS)
        yield from out[waited:needed]
        waited = needed
        yield step.simulation.work(step.host.forward, step.workload.numel / _NUM_LAYERS)


def _backward(step: SimulatedStep, update: Update, stores_gradients: bool) -> Process:
    """Compute, then store gradients: the published seconds of backward are the sum of both."""
    gradients = step.workload.gradients
    yield step.simulation.work(step.host.backward, step.workload.numel)
    if gradients.sparse:
        yield step.simulation.work(step.host.top_k, step.workload.numel)
    if stores_gradients:
        nbytes = gradients.nbytes(update.numel // len(step.lanes))
        yield from [step.simulation.work(lane.store, nbytes) for lane in step.lanes]


def _traffic(step: SimulatedStep, update: Update) -> SimulatedTraffic:
    """Scale the traffic of the simulated devices, whose share is rounded up to tasklets, to all devices."""
    scale = step.workload.numel / update.numel
    return SimulatedTraffic(
        shared_down=scale * sum(lane.down.done + lane.store.done for lane in step.lanes),
        shared_up=scale * sum(lane.up.done + lane.load.done for lane in step.lanes),
        internal_read=scale * sum(lane.read.done for lane in step.lanes),
        internal_write=scale * sum(lane.write.done for lane in step.lanes),
    )
