"""The cost model: whether compressed gradients make a step shorter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_smartinfinity.compression import GradientCodec, TopK
from lightning_smartinfinity.plan.gradients import GradientForm, TopKPayload
from lightning_smartinfinity.plan.handler import Route
from lightning_smartinfinity.plan.machine import Channel, Device, Gpu, Host, Machine
from lightning_smartinfinity.plan.paper import FIGURES
from lightning_smartinfinity.plan.step import System, simulate_step
from lightning_smartinfinity.plan.workload import Workload

__all__ = ["CompressionGain", "gain_of", "gain_on_cards", "gain_on_host", "published_smartssds"]

_CHANNEL = 6.3e9  # bytes per second of a switch's uplink; published: 6.3 to 8
_NUM_TASKLETS = 64  # of each device: enough for the steady state
_LEAST_GAIN = 0.01
_SELECT = 1.3e-9  # seconds of one core per parameter: docs/gradient_codecs.md, large tasklets, top 1 % with a residual
_VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class CompressionGain:
    """What compression is predicted to change.

    Args:
        ratio: Seconds of the update with dense gradients over those with compressed ones.
        reason: One sentence: why it gains, or does not.
    """

    ratio: float
    reason: str

    @property
    def gains(self) -> bool:
        """By 1 % or more."""
        return self.ratio >= 1 + _LEAST_GAIN


def gain_of(
    codec: GradientCodec, workload: Workload, *, num_cards: int, num_cores: int, route: Route = Route.HOST
) -> CompressionGain:
    """Of a user's codec on this machine, whose cards are taken to be as published.

    Args:
        codec: The user's.
        workload: The step with dense gradients. Its size does not matter.
        num_cards: That update for this process; 0: the host does.
        num_cores: Of this process, which choose what is sent.
        route: Of gradients to cards.
    """
    if num_cards == 0 or not isinstance(codec, TopK):
        return gain_on_host()
    dense = workload.gradients.nbytes(1)
    value_bytes = int(dense) if codec.value_dtype == "auto" else _VALUE_BYTES[codec.value_dtype]
    machine = published_smartssds(num_cards, select=_SELECT / num_cores)
    return gain_on_cards(machine, workload, TopKPayload(codec.ratio, value_bytes), route=route)


def gain_on_host() -> CompressionGain:
    """Of an update by the host's CPU, whose gradients lie in host memory: there never is one."""
    return CompressionGain(
        1.0,
        "On the host device gradients lie in host memory: they cross no channel to storage that compression could"
        " relieve, and choosing what is sent takes CPU time.",
    )


def gain_on_cards(
    machine: Machine, workload: Workload, compressed: GradientForm, *, route: Route = Route.HOST
) -> CompressionGain:
    """Of updates by accelerators.

    Args:
        machine: Its figures. Where choosing what is sent costs nothing (``Host.select``), so does this prediction: what
            gains nothing then never does.
        workload: The step with dense gradients. Its size does not matter.
        compressed: Form of the compressed gradients.
        route: Of the gradients.
    """
    numel = _NUM_TASKLETS * machine.num_devices * workload.card_layout(1).extents.tasklet_numel
    dense = replace(workload, numel=numel)
    of = [(machine, dense), (machine, replace(dense, gradients=compressed))]
    seconds = [simulate_step(*one, System.CARDS, route=route).update for one in of]
    ratio = seconds[0] / seconds[1]
    part = compressed.nbytes(numel) / dense.gradients.nbytes(numel)
    sent = f"Sending {part:.1%} of the gradients' bytes to {machine.num_devices} device(s)"
    if ratio >= 1 + _LEAST_GAIN:
        return CompressionGain(ratio, f"{sent} makes the update {ratio:.2f} times as fast.")
    return CompressionGain(
        ratio,
        f"{sent} makes the update {ratio:.2f} times as fast: it waits for what the devices read and write themselves,"
        " or for the choice of what is sent, not for the channel.",
    )


def published_smartssds(num_devices: int, *, duplex: bool = False, select: float = 0.0) -> Machine:
    """A machine of SmartSSDs by published figures, without a model.

    Args:
        num_devices: How many.
        duplex: Their SSDs read and write side by side.
        select: Seconds of the CPU per parameter, for choosing what a compressed gradient keeps.
    """
    return Machine(
        device=Device(
            read=FIGURES["read"].value,
            write=FIGURES["write"].value,
            duplex=duplex,
            kernel=FIGURES["kernel"].value,
            sparse_kernel=FIGURES["sparse_kernel"].value,
        ),
        num_devices=num_devices,
        channel=Channel(down=_CHANNEL, up=_CHANNEL, together=_CHANNEL),
        gpu=Gpu(forward=0.0, backward=0.0),
        host=Host(select=select),
    )
