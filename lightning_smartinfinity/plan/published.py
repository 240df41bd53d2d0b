"""Smart-Infinity's handler as published, and ZeRO-Infinity on RAID0, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_smartinfinity.plan.virtual_time import Process, Simulation
from lightning_smartinfinity.plan.wiring import HostPaths, Lane
from lightning_smartinfinity.plan.workload import ENOUGH_TASKLETS, Workload

__all__ = ["smart_update", "zero_infinity"]

_TASKLET_NUMEL = 10_000_000  # of one device; as they go one after the other, it hardly matters
_SUB_GROUP_NUMEL = 100_000_000
_MASTER_BYTES = 4


def smart_update(
    simulation: Simulation, lanes: Sequence[Lane], host: HostPaths, *, workload: Workload, numel: int, optimized: bool
) -> Process:
    """The update: rounds of one tasklet per device, with a barrier after each.

    A tasklet's reads, kernel and writes follow each other. Parameters are written first, and come up before the rest is
    written; ``optimized``, the next tasklet's gradient is read beside that. Gradients lie on the SSDs since backward.

    Args:
        simulation: Its time.
        lanes: Of each device.
        host: The host's.
        workload: Of the step.
        numel: Parameters of each device.
        optimized: With the published handler (SU+O); False: without (SU).
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
    """One of a device, with the bytes of gradients that are read before its update and beside its last write."""
    before, beside = gradients
    arrays, master = workload.array_bytes * numel, _MASTER_BYTES * numel
    yield simulation.work(lane.read, arrays + before)
    yield simulation.work(lane.kernel_for(workload.gradients), workload.kernel_bytes * numel)
    yield simulation.work(lane.write, master)
    yield simulation.work(lane.up, workload.parameter_bytes * numel)
    yield simulation.work(host.receive, numel)
    yield from [simulation.work(lane.write, arrays - master), simulation.work(lane.read, beside)]


def zero_infinity(simulation: Simulation, lane: Lane, *, workload: Workload, numel: int) -> Process:
    """The update by the host's CPU, over a RAID0 of all devices: each sub-group is read, updated and written in turn.

    The published seconds do not tell the CPU's own apart; they are in the rate of the channel that was fitted to them.

    Args:
        simulation: Its time.
        lane: Of one device, which stands for all: stripes are the same on each.
        workload: Of the step.
        numel: Parameters of each device.
    """
    for size in _sizes(numel, _SUB_GROUP_NUMEL):
        yield simulation.work(lane.load, workload.array_bytes * size + workload.gradients.nbytes(size))
        yield simulation.work(lane.store, workload.array_bytes * size)


def _sizes(numel: int, usual: int) -> list[int]:
    """Of pieces that go one after the other; in large models larger ones."""
    size = max(usual, -(-numel // ENOUGH_TASKLETS))
    return [min(size, numel - begin) for begin in range(0, numel, size)]
