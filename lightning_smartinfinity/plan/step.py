"""A whole training step in virtual time: forward, backward and the update of any of the systems."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_smartinfinity.checks import check, instance
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where
from lightning_smartinfinity.plan.handler import Route
from lightning_smartinfinity.plan.hardware import Machine
from lightning_smartinfinity.plan.systems import BEGIN, Run, System, Update
from lightning_smartinfinity.plan.virtual_time import Event, Process
from lightning_smartinfinity.plan.workload import Workload

__all__ = ["Overlap", "StepTime", "System", "Traffic", "simulate_step"]

_NUM_LAYERS = 32
_OURS = (System.CARDS, System.HOST)


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
        update: From its start until all is written, and what was not sent is kept.
        step: From one step to the next.
        traffic: What was moved.
    """

    forward: float
    backward: float
    update: float
    step: float
    traffic: Traffic


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
        ConfigError: One is of another type, or they do not go together.
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
    run = Run.of(machine, workload, system, route)
    update = BEGIN[system](run)
    stores_gradients = system not in _OURS or (system is System.CARDS and route is Route.BACKWARD)
    keeps_rest = system is System.CARDS and workload.gradients.compressed
    marks: dict[str, float] = {}
    timed = run.simulation.start(_timed(run, update.finished, keeps_rest, marks))
    steps = _step(
        run,
        update,
        timed,
        stores_gradients,
        marks,
        forward_waits=overlap is Overlap.NONE,
        # What is kept of these gradients is kept before the next ones come.
        backward_waits=keeps_rest and machine.host.feed_back > 0,
    )
    run.simulation.start(steps)
    step = run.simulation.run()
    forward = machine.gpu.forward * workload.numel
    return StepTime(forward=forward, step=step, traffic=_traffic(run, update), **marks)


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
    run: Run,
    update: Update,
    timed: Event,
    stores_gradients: bool,
    marks: dict[str, float],
    *,
    forward_waits: bool,
    backward_waits: bool,
) -> Process:
    """In the order update, forward, backward: with an overlap the update is that of the step before."""
    if forward_waits:
        yield timed
    yield from _forward(run, update)
    if backward_waits:
        yield timed
    began = run.simulation.now
    yield from _backward(run, update, stores_gradients)
    marks["backward"] = run.simulation.now - began
    yield timed


def _timed(run: Run, finished: Event, keeps_rest: bool, marks: dict[str, float]) -> Process:
    """The update, and what has to follow before the next one."""
    yield finished
    if keeps_rest:
        yield run.simulation.work(run.host.feed_back, run.workload.numel)
    marks["update"] = run.simulation.now


def _forward(run: Run, update: Update) -> Process:
    """Layer by layer, each as soon as its parameters are there."""
    out = update.parameters_out or [update.finished]
    waited = 0
    for layer in range(1, _NUM_LAYERS + 1):
        needed = -(-layer * len(out) // _NUM_LAYERS)
        yield from out[waited:needed]
        waited = needed
        yield run.simulation.work(run.host.forward, run.workload.numel / _NUM_LAYERS)


def _backward(run: Run, update: Update, stores_gradients: bool) -> Process:
    """Gradients are stored in their turn: the published seconds of backward are the sum of both."""
    gradients = run.workload.gradients
    yield run.simulation.work(run.host.backward, run.workload.numel)
    if gradients.sparse:
        yield run.simulation.work(run.host.top_k, run.workload.numel)
    if stores_gradients:
        nbytes = gradients.nbytes(update.numel // len(run.lanes))
        yield from [run.simulation.work(lane.store, nbytes) for lane in run.lanes]


def _traffic(run: Run, update: Update) -> Traffic:
    """Of all devices, of which those that are simulated may have a tasklet more than their share."""
    scale = run.workload.numel / update.numel
    return Traffic(
        shared_down=scale * sum(lane.down.done + lane.store.done for lane in run.lanes),
        shared_up=scale * sum(lane.up.done + lane.load.done for lane in run.lanes),
        internal_read=scale * sum(lane.read.done for lane in run.lanes),
        internal_write=scale * sum(lane.write.done for lane in run.lanes),
    )
