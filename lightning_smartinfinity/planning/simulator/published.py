"""Smart-Infinity's handler as published, and ZeRO-Infinity on RAID0, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_smartinfinity.planning.simulator.virtual_time import Process, Simulation
from lightning_smartinfinity.planning.simulator.wiring import HostPaths, Lane
from lightning_smartinfinity.planning.simulator.workload import ENOUGH_TASKLETS, Workload

__all__ = ["smart_update", "zero_infinity"]

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
