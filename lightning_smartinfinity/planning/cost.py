"""Predicts whether compressed gradients make a step shorter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_smartinfinity import native
from lightning_smartinfinity.planning.simulator.gradients import BlockScaledPayload, GradientForm, TopKPayload
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.hardware import COUNT, Channel, Device, Gpu, Host, Machine
from lightning_smartinfinity.planning.simulator.step import System, simulate_step
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.settings import GradientCodec, TopK
from lightning_smartinfinity.settings.rules import between, instance, require

__all__ = ["CompressionGain", "CompressionResources", "gain_of", "gain_on_cards", "gain_on_host", "published_smartssds"]

_CHANNEL = 6.3e9  # bytes per second of a switch's uplink; published: 6.3 to 8
_NUM_TASKLETS = 64  # for each device: enough to reach the steady state
_LEAST_GAIN = 0.01
FEED_BACK = 0.8e-9
"""Seconds of one core per parameter to update the residual after the top 1 % (docs/gradient_codecs.md)."""
_TO_GPU = 20e9  # bytes per second from host memory: assumed, not measured; PCIe 4.0 x16 allows 32e9
_FP32_BYTES = 4
_DTYPES = {2: native.DType.BFLOAT16, 4: native.DType.FLOAT32}
_ITEM_BYTES = {native.DType.FLOAT32: 4, native.DType.BFLOAT16: 2, native.DType.FLOAT16: 2}


@dataclass(frozen=True)
class _Work:
    """Seconds of one core per parameter in large tasklets (docs/gradient_codecs.md).

    Args:
        compress: Time to compress; the key says whether there is a residual.
        feed_back: Time to store the elements not sent in the residual.
    """

    compress: Mapping[bool, float]
    feed_back: float


# For the top 1 %, for more than 2 %, and for 8 bits. Small tasklets are equally fast.
_TOP_K = _Work({False: 0.65e-9, True: 1.3e-9}, FEED_BACK)
_FEW = 0.02
_TOP_OF_MANY = _Work({False: 3.6e-9, True: 3.6e-9}, FEED_BACK)
_BLOCK_SCALED = _Work({False: 0.8e-9, True: 1.1e-9}, 1.1e-9)


@dataclass(frozen=True)
class CompressionGain:
    """The predicted gain from compression.

    Args:
        ratio: Seconds of the update with dense gradients, divided by those with compressed gradients.
        reason: Sentence that explains why compression helps, or does not.
    """

    ratio: float
    reason: str

    @property
    def gains(self) -> bool:
        """Whether the update gains 1 % or more."""
        return self.ratio >= 1 + _LEAST_GAIN


@dataclass(frozen=True, kw_only=True)
class CompressionResources:
    """The parts of a machine that work on compressed gradients, over all of its processes.

    Cards share a channel, and processes share cores.

    Args:
        num_cards: Number of cards that update; 0 if the host does.
        num_cores: Number of CPU cores.
        num_threads: Number of threads that store the elements not sent in the residual.
        num_gpus: Number of GPUs that select the elements to send; 0 if the CPU does.
        route: Route of gradients to the cards.

    Raises:
        ConfigError: A value is out of range.
    """

    num_cards: int
    num_cores: int
    num_threads: int = 1
    num_gpus: int = 0
    route: Route = Route.HOST

    def __post_init__(self) -> None:
        some = between(0, 1_000_000)
        require(self, num_cards=some, num_cores=COUNT, num_threads=COUNT, num_gpus=some, route=instance(Route))


def gain_of(codec: GradientCodec, workload: Workload, resources: CompressionResources) -> CompressionGain:
    """Predict the gain from a codec on this machine, assuming cards with the published figures.

    Args:
        codec: Codec that the user chose.
        workload: The step with dense gradients. Its size does not matter.
        resources: The parts of the machine that compress and update.
    """
    if resources.num_cards == 0:
        return gain_on_host()
    item_bytes = int(workload.gradients.nbytes(1))
    residual_bytes = codec.keeps_residual * _FP32_BYTES
    work = _work_of(codec)
    select, cores = work.compress[codec.keeps_residual], resources.num_cores
    if isinstance(codec, TopK) and codec.exact and resources.num_gpus:
        select, cores = (item_bytes + residual_bytes) / _TO_GPU, resources.num_gpus
    feed_back = work.feed_back / min(resources.num_threads, resources.num_cores) if residual_bytes else 0.0
    return gain_on_cards(
        published_smartssds(resources.num_cards, select=select, cores=cores),
        workload,
        _form_of(codec, item_bytes),
        route=resources.route,
        feed_back=feed_back,
    )


def _work_of(codec: GradientCodec) -> _Work:
    if isinstance(codec, TopK):
        return _TOP_K if codec.ratio <= _FEW else _TOP_OF_MANY
    return _BLOCK_SCALED


def _form_of(codec: GradientCodec, item_bytes: int) -> GradientForm:
    """Return the form of gradients that have ``item_bytes`` per element before compression."""
    if isinstance(codec, TopK):
        return TopKPayload(codec.ratio, _ITEM_BYTES[codec.native().value_dtype(_DTYPES[item_bytes])])
    return BlockScaledPayload()


def gain_on_host() -> CompressionGain:
    """Return the gain if the host's CPU updates: there is none, since gradients are already in host memory."""
    return CompressionGain(
        1.0,
        "With the host device, gradients stay in host memory, so compression saves no transfer and costs CPU time.",
    )


def gain_on_cards(
    machine: Machine,
    workload: Workload,
    compressed: GradientForm,
    *,
    route: Route = Route.HOST,
    feed_back: float = 0.0,
) -> CompressionGain:
    """Predict the gain if accelerators update.

    Args:
        machine: Figures of the machine.
        workload: The step with dense gradients. Its size does not matter.
        compressed: Form of the compressed gradients.
        route: Route of the gradients.
        feed_back: Seconds per parameter after the update, to store the elements not sent.
    """
    numel = _NUM_TASKLETS * machine.num_devices * workload.card_layout(1).extents.tasklet_numel
    dense = replace(workload, numel=numel)
    sparse = replace(dense, gradients=compressed)
    before = simulate_step(machine, dense, System.CARDS, route=route).update
    after = simulate_step(machine, sparse, System.CARDS, route=route).update + feed_back * numel
    free = replace(machine, host=replace(machine.host, select=0.0))
    at_best = before / simulate_step(free, sparse, System.CARDS, route=route).update
    part = compressed.nbytes(numel) / dense.gradients.nbytes(numel)
    return CompressionGain(before / after, _reason(part, machine.num_devices, before / after, at_best))


def _reason(part: float, num_devices: int, ratio: float, at_best: float) -> str:
    """Return a sentence that explains the gain.

    Args:
        part: Bytes sent, as a share of those of dense gradients.
        num_devices: Number of devices to which they are sent.
        ratio: Gain, as in :class:`CompressionGain`.
        at_best: Gain if compressing, and storing the elements not sent, took no time.
    """
    sent = f"Sending {part:.1%} of the gradients' bytes to {num_devices} device(s)"
    made = f"{sent} makes the update {ratio:.2f} times as fast"
    if ratio >= 1 + _LEAST_GAIN:
        return f"{made}."
    if part >= 1:
        return f"{made}: values plus indices are no fewer bytes than the dense gradients."
    if at_best >= 1 + _LEAST_GAIN:
        return f"{made}: selecting the elements to send and keeping the others takes longer than it saves."
    limited = f"{made}: the devices' own reads, compute and writes are the bottleneck, not the channel."
    if ratio > 1 - _LEAST_GAIN:
        return limited
    return f"{limited} Selecting the elements to send and keeping the others takes additional time."


def published_smartssds(num_devices: int, *, duplex: bool = False, select: float = 0.0, cores: int = 1) -> Machine:
    """Return a machine of SmartSSDs with published figures, without a model.

    Args:
        num_devices: Number of SmartSSDs.
        duplex: Whether their SSDs read and write at the same time.
        select: Seconds of one core or GPU per parameter, for compressing gradients.
        cores: Number of cores or GPUs that compress.
    """
    return Machine(
        device=Device.published(duplex=duplex),
        num_devices=num_devices,
        channel=Channel(down=_CHANNEL, up=_CHANNEL, together=_CHANNEL),
        gpu=Gpu(forward=0.0, backward=0.0),
        host=Host(select=select, cores=cores),
    )
