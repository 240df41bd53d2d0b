"""Paths over a machine's resources: the resources that each kind of work uses at the same time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_smartinfinity.planning.simulator.gradients import GradientForm
from lightning_smartinfinity.planning.simulator.hardware import Channel, Device, Machine
from lightning_smartinfinity.planning.simulator.virtual_time import Path, Resource

__all__ = ["HostPaths", "Lane", "connect"]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Paths of one device; units are bytes.

    Args:
        read: SSD to accelerator.
        write: Accelerator to SSD.
        down: Host to accelerator.
        up: Accelerator to host.
        load: SSD to host.
        store: Host to SSD.
        kernel: Accelerator with dense gradients.
        sparse_kernel: Accelerator with sparse gradients.
    """

    read: Path
    write: Path
    down: Path
    up: Path
    load: Path
    store: Path
    kernel: Path
    sparse_kernel: Path

    def kernel_for(self, gradients: GradientForm) -> Path:
        return self.sparse_kernel if gradients.sparse else self.kernel


@dataclass(frozen=True, kw_only=True)
class HostPaths:
    """Paths of the host and its GPU; units are parameters.

    Args:
        select: Function that makes a path for one tasklet, which uses one of the cores shared by all tasklets.
    """

    update: Path
    receive: Path
    select: Callable[[], Path]
    feed_back: Path
    forward: Path
    backward: Path
    top_k: Path


def connect(machine: Machine, num_lanes: int) -> tuple[list[Lane], HostPaths]:
    """Make a machine's paths.

    Args:
        machine: The machine.
        num_lanes: Number of devices, or 1 if one device represents all, which work in lockstep.
    """
    assert num_lanes in (1, machine.num_devices)
    copies = machine.num_devices // num_lanes
    shared = _Shared(machine.channel, copies)
    cpu, cores, gpu = Resource("host", copies), Resource("cores", copies), Resource("gpu")
    of_one, of_all = machine.host.select, machine.host.select / machine.host.cores
    host = HostPaths(
        update=Path(((cpu, machine.host.update),)),
        receive=Path(((cpu, machine.host.receive),)),
        select=lambda: Path(((Resource("core"), of_one), (cores, of_all))),
        feed_back=Path(((Resource("memory"), machine.host.feed_back),)),
        forward=Path(((gpu, machine.gpu.forward),)),
        backward=Path(((gpu, machine.gpu.backward),)),
        top_k=Path(((gpu, machine.gpu.top_k),)),
    )
    return [_lane(machine.device, shared) for _ in range(num_lanes)], host


class _Shared:
    """Uses of the channel that all devices share, for each direction."""

    def __init__(self, channel: Channel, copies: int) -> None:
        together = 0.0 if channel.together is None else 1 / channel.together
        both = (Resource("channel", copies), together)
        self.down = ((Resource("channel down", copies), 1 / channel.down), both)
        self.up = ((Resource("channel up", copies), 1 / channel.up), both)


def _lane(device: Device, shared: _Shared) -> Lane:
    reading = Resource("SSD")
    writing = Resource("SSD writes") if device.duplex else reading
    accelerator = Resource("accelerator")
    read, write = (reading, 1 / device.read), (writing, 1 / device.write)
    kernel = 0.0 if device.kernel is None else 1 / device.kernel
    sparse = kernel if device.sparse_kernel is None else 1 / device.sparse_kernel
    return Lane(
        read=Path((read,)),
        write=Path((write,)),
        down=Path(shared.down),
        up=Path(shared.up),
        load=Path((read, *shared.up)),
        store=Path((write, *shared.down)),
        kernel=Path(((accelerator, kernel),)),
        sparse_kernel=Path(((accelerator, sparse),)),
    )
