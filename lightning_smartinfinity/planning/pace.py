"""Predicts, as ranges, the time of a step by its parts, the hours of a training and the life of a drive."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.needs import layout_of, spilled_gradient_bytes, state_bytes
from lightning_smartinfinity.planning.simulator.gradients import Dense
from lightning_smartinfinity.planning.simulator.hardware import Channel, Device, Gpu, Host, Machine
from lightning_smartinfinity.planning.simulator.step import Overlap, StepTime, System, simulate_step
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.storage.records.residual_file import residual_bytes

__all__ = [
    "TBW_PER_TB",
    "Pace",
    "Range",
    "Rates",
    "assumed_rates",
    "pace",
    "seconds_beside_update",
    "written_bytes",
]

TBW_PER_TB = 600
"""Terabytes that a drive may write in its life per terabyte of its size; assumed, usual for consumer drives."""

_WIDE = 1e17  # bytes per second of a channel that is never the bottleneck
_SIMULATED_TASKLETS = 256  # enough to reach the steady state; the seconds of a longer step are proportional
_MOST_KEPT = 0.999  # share of the state; with all of it kept, the simulated drive's rate would be infinite
_TERA = 1e12
_SECONDS_PER_HOUR, _SECONDS_PER_DAY = 3600.0, 86400.0
_MEGA_TOKENS = 1e6


@dataclass(frozen=True)
class Range:
    """A value between two bounds.

    Args:
        low: Lower bound.
        high: Upper bound.
        measured: Whether the value was measured or computed from measured values only; False if the bounds are assumed.
    """

    low: float
    high: float
    measured: bool = False

    @classmethod
    def exactly(cls, value: float) -> Range:
        """Return a measured value."""
        return cls(value, value, measured=True)

    def times(self, factor: float) -> Range:
        """Return the range multiplied by a positive number."""
        return replace(self, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a machine, per second.

    Args:
        flops: Operations of forward that a training of this model reaches.
        backward_flops: Operations of backward that it reaches.
        copy: Bytes copied within host memory.
        drive_read: Bytes that the drive reads while it does nothing else.
        drive_write: Bytes that the drive writes while it does nothing else.
        update: Parameters that the CPU updates.
        to_gpu: Bytes between host memory and the GPU.
        network: Bytes that a machine receives from others, and sends at the same time.
    """

    flops: Range
    backward_flops: Range
    copy: Range
    drive_read: Range
    drive_write: Range
    update: Range
    to_gpu: Range
    network: Range = Range(1e9, 5e10)


def assumed_rates(*, on_gpu: bool, cores: int, in_16_bit: bool = True) -> Rates:
    """Return assumed rates of a machine without measurements: from slow to fast current machines.

    Args:
        on_gpu: Whether a GPU computes; otherwise the CPU's cores do.
        cores: Number of CPU cores.
        in_16_bit: Whether forward and backward compute in 16 bit.
    """
    halves = 1.0 if in_16_bit else 0.5
    flops = Range(2e13 * halves, 3e14 * halves) if on_gpu else Range(1e10 * cores, 1.5e11 * halves * cores)
    return Rates(
        flops=flops,
        backward_flops=flops,
        copy=Range(4e9, 2e10),
        drive_read=Range(1e9, 7e9),
        drive_write=Range(1e9, 5e9),
        update=Range(3e8, 1e9),
        to_gpu=Range(6e9, 2.5e10),
    )


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a step by part, and figures computed from them.

    With an overlap the parts add up to more than the step.

    Args:
        forward: Seconds of forward.
        backward: Seconds of backward, recomputation included.
        parameters: Seconds to transfer parameters to the place of their use, and back.
        gradients: Seconds to move gradients into host memory, and those beyond the budget to storage and back.
        network: Seconds to gather parameters from other machines, and to send these their parts of the gradients.
        update: Seconds of the update.
        step: Seconds of a whole step.
        written_bytes: Bytes that a step writes to the storage of a machine, if it takes as long as ``step.high``.
        tokens_per_step: Tokens per step.
    """

    forward: Range
    backward: Range
    parameters: Range
    gradients: Range
    network: Range
    update: Range
    step: Range
    written_bytes: int
    tokens_per_step: int

    @property
    def hours_per_million_tokens(self) -> Range:
        """Hours in which a million tokens are trained."""
        return self.step.times(_MEGA_TOKENS / self.tokens_per_step / _SECONDS_PER_HOUR)

    def life_in_steps(self, tbw: float) -> float:
        """Return the steps after which a drive has written ``tbw`` terabytes."""
        return tbw * _TERA / self.written_bytes

    def life_in_days(self, tbw: float) -> Range:
        """Return the days of uninterrupted training after which a drive has written ``tbw`` terabytes."""
        return self.step.times(self.life_in_steps(tbw) / _SECONDS_PER_DAY)


def pace(model: ModelFigures, training: Training, rates: Rates, *, on_gpu: bool) -> Pace | None:
    """Return the time of a step whose update runs during the next forward; None if the passes are unknown.

    Args:
        model: The model.
        training: The training.
        rates: Rates of the machine.
        on_gpu: Whether a GPU computes.
    """
    parts = _parts(model, training, rates, on_gpu=on_gpu)
    if parts is None:
        return None
    slow, fast = (_simulated(model, training, rates, bound) for bound in (_low, _high))
    known = rates.drive_read.measured and rates.update.measured
    update = Range(fast.update(), slow.update(), known)
    forward, *rest = parts.values()
    step = Range(
        fast.step(forward.low, sum(part.low for part in rest)),
        slow.step(forward.high, sum(part.high for part in rest)),
        known and all(part.measured for part in parts.values()),
    )
    return Pace(
        **parts,
        update=update,
        step=step,
        written_bytes=written_bytes(model, training, step_seconds=step.high),
        tokens_per_step=training.tokens_per_step,
    )


def seconds_beside_update(model: ModelFigures, training: Training, rates: Rates, *, on_gpu: bool) -> float:
    """Return the upper bound of a step's other parts, in seconds, to compare trainings with equal updates."""
    parts = _parts(model, training, rates, on_gpu=on_gpu) or {}
    return sum(part.high for part in parts.values())


def _parts(model: ModelFigures, training: Training, rates: Rates, *, on_gpu: bool) -> dict[str, Range] | None:
    """Return the parts of a step other than the update, forward first; None if the passes are unknown."""
    passes = model.passes_of(training.batch)
    if passes is None:
        return None
    # Without GPUs all processes share the cores and the memory's bandwidth.
    count = training.accumulate * (1 if on_gpu else training.processes)
    recomputed = passes.recomputed_flops(checkpointing=training.checkpointing)
    # On a CPU, each gradient is read in one place and written to another. On GPUs, each process copies only its share.
    copied = model.trained_numel * (training.item_bytes + training.gradient_itemsize)
    spilled = training.accumulate * training.processes * spilled_gradient_bytes(model, training)
    sent = -(-model.trained_numel // training.world_size) * training.item_bytes
    return {
        "forward": _seconds(count * passes.forward_flops, rates.flops),
        "backward": _seconds(count * recomputed, rates.backward_flops),
        "parameters": _parameter_seconds(model, training, rates, on_gpu=on_gpu),
        "gradients": _sum(
            _seconds(count * sent, rates.to_gpu) if on_gpu else _seconds(count * copied, rates.copy),
            _seconds(spilled, rates.drive_write),
            _seconds(spilled, rates.drive_read),
        ),
        "network": _network_seconds(model, training, rates),
    }


def written_bytes(model: ModelFigures, training: Training, *, step_seconds: float = math.inf) -> int:
    """Return the bytes that a step writes to the storage of a machine.

    They are state, parameters on storage, spilled gradients and a residual. State in host memory counts with its share
    of a write at an interval.

    Args:
        model: The model.
        training: The training.
        step_seconds: Seconds of a step. Infinite: each step is longer than an interval.
    """
    extents = layout_of(model.trained, training).extents
    resident = min(training.cache_bytes, state_bytes(model, training))
    written = int(resident * _writes_per_step(training, step_seconds))
    state = state_bytes(model, training) - resident + written
    stored = training.item_bytes * extents.numel if training.offload_param == "nvme" else 0
    spilled = training.accumulate * spilled_gradient_bytes(model, training)
    residual = residual_bytes(extents.numel) // 2 if training.keeps_residual else 0
    return training.processes * (state + stored + spilled + residual)


def _writes_per_step(training: Training, step_seconds: float) -> float:
    """Return how often a step writes state in host memory to storage."""
    if training.places == 1:
        return 0.0
    if training.interval is None or not training.writes_back:
        return 1.0
    return min(1.0, (1 if isinstance(training.interval, int) else step_seconds) / training.interval)


def _low(of: Range) -> float:
    return of.low


def _high(of: Range) -> float:
    return of.high


def _seconds(amount: float, rate: Range) -> Range:
    return Range(amount / rate.high, amount / rate.low, rate.measured)


def _sum(*parts: Range) -> Range:
    low, high = sum(part.low for part in parts), sum(part.high for part in parts)
    return Range(low, high, all(part.measured for part in parts if part.high))


def _parameter_seconds(model: ModelFigures, training: Training, rates: Rates, *, on_gpu: bool) -> Range:
    """Return the seconds to read parameters for each forward and backward, or to send updated ones to a GPU."""
    nbytes = 2 * training.accumulate * training.item_bytes * model.numel
    if training.offload_param == "nvme":
        return _seconds(nbytes / training.nodes, rates.drive_read)
    if not on_gpu:
        return Range.exactly(0.0)
    if training.offload_param == "cpu":
        return _seconds(nbytes / training.world_size, rates.to_gpu)
    return _seconds(training.item_bytes * model.trained_numel / training.world_size, rates.to_gpu)


def _network_seconds(model: ModelFigures, training: Training, rates: Rates) -> Range:
    """Return the seconds of ZeRO-3's gathers and reductions on a machine's network.

    Each micro-batch gathers all parameters, except the machine's own part, in forward and again in backward, and sends
    the other machines their parts of the gradients: Rajbhandari et al., "ZeRO" (2020), section 7.
    """
    if training.nodes == 1:
        return Range.exactly(0.0)
    moved = training.accumulate * training.item_bytes * (2 * model.numel + model.trained_numel)
    return _seconds(moved * (1 - 1 / training.nodes), rates.network)


@dataclass(frozen=True)
class _Simulated:
    """Simulates updates on a machine, with just enough tasklets to reach the steady state."""

    machine: Machine
    workload: Workload
    scale: float

    def update(self) -> float:
        return self.scale * self._run(0.0, 0.0).update

    def step(self, forward: float, rest: float) -> float:
        return self.scale * self._run(forward, rest).step

    def _run(self, forward: float, rest: float) -> StepTime:
        per = self.scale * self.workload.numel
        gpu = Gpu(forward=max(forward / per, 1e-17), backward=max(rest / per, 1e-17))
        return simulate_step(replace(self.machine, gpu=gpu), self.workload, System.HOST, overlap=Overlap.FORWARD)


def _simulated(model: ModelFigures, training: Training, rates: Rates, bound: Callable[[Range], float]) -> _Simulated:
    extents = layout_of(model.trained, training).extents
    numel = min(extents.numel, _SIMULATED_TASKLETS * extents.tasklet_numel)
    workload = Workload(
        numel=numel,
        gradients=Dense(training.gradient_itemsize),
        num_arrays=training.num_arrays,
        parameter_bytes=training.item_bytes,
        state_format=training.state_format,
        num_buffers=training.num_buffers,
    )
    # State in host memory is not read, and not written except at an interval, in the background.
    kept = min(training.cache_bytes / max(1, state_bytes(model, training)), _MOST_KEPT)
    unwritten = kept if training.writes_back or training.places == 1 else 0.0
    machine = Machine(
        device=Device(read=bound(rates.drive_read) / (1 - kept), write=bound(rates.drive_write) / (1 - unwritten)),
        num_devices=1,
        channel=Channel(down=_WIDE, up=_WIDE),
        gpu=Gpu(forward=0.0, backward=0.0),
        host=Host(update=1 / bound(rates.update)),
    )
    return _Simulated(machine, workload, training.processes * extents.numel / numel)
