"""Decides whether a training fits; finds the cheapest settings that fit, and alternatives without storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isqrt

from lightning_smartinfinity.pipeline.layout.free_memory import margin_of
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.needs import (
    CUDA_CONTEXT_BYTES,
    PROCESS_BYTES,
    MemoryKind,
    Need,
    activation_owners,
    least_gradient_budget,
    least_parameter_budget,
    needs,
    pinned_partition_bytes,
)
from lightning_smartinfinity.planning.pace import Pace, Rates, pace, seconds_beside_update
from lightning_smartinfinity.planning.training import OFFLOADS, Training

__all__ = [
    "BUDGETS",
    "PINNED_SHARE",
    "TIGHT",
    "Alternative",
    "Plan",
    "Resources",
    "alternatives",
    "cheapest",
    "fits",
    "gradient_budgets",
    "lack",
    "make_plan",
    "nearest",
    "parameter_budgets",
    "with_pinned",
]

_BF16_BYTES, _FP32_BYTES, _ADAM_BYTES, _ADAM_8_BIT_BYTES = 2, 4, 8, 2
_GATHERED_BY_FSDP = 3
_LORA = 0.01  # usual size of adapters, as a share of the parameters
_FORMATS = ("fp32", "bf16", "int8")

BUDGETS = (4 * 10**9, 10**9, 256 * 10**6)
"""Budgets of gradients, and of parameters, in bytes, tried in descending order if not all of them fit."""

TIGHT = 0.9
"""Share of the available bytes above which a need is tight, because plans are accurate to 10 %."""

PINNED_SHARE = 0.5
"""Most of the host memory, as a share, that frozen parameters may pin: pinned memory cannot be swapped or reclaimed."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The memory, disk and processors of a machine.

    Args:
        host_memory: Bytes of host memory that processes may use.
        kept_free: Bytes of these that state in memory leaves free; None: a quarter.
        storage_is_memory: Whether the storage folder is in memory, so that no other state is kept there.
        disk: Bytes free on the disk of the storage folder.
        cores: Number of CPU cores.
        gpu_memory: Bytes of each GPU; None if there is no GPU.
        num_gpus: Number of GPUs.
        drive_bytes: Size of the drive in bytes.
        num_drives: Number of drives that hold the state.
        process_bytes: Host memory of a process before it trains.
    """

    host_memory: int
    disk: int
    kept_free: int | None = None
    storage_is_memory: bool = False
    cores: int = 1
    gpu_memory: int | None = None
    num_gpus: int = 0
    drive_bytes: int = 0
    num_drives: int = 1
    process_bytes: int = PROCESS_BYTES

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.gpu_memory is not None

    @property
    def margin(self) -> int:
        """Bytes of host memory that state in memory leaves free, for activations, page cache and other processes."""
        return margin_of(self.host_memory) if self.kept_free is None else self.kept_free

    def has(self, place: MemoryKind) -> int:
        """Return the available bytes of one kind of memory."""
        sizes = {MemoryKind.GPU: self.gpu_memory or 0, MemoryKind.HOST: self.host_memory, MemoryKind.DISK: self.disk}
        return sizes[place]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The bytes and the seconds that a training needs.

    Args:
        training: The training.
        needs: Bytes by place and phase.
        broken: The needs that exceed the available bytes.
        tight: The needs that fit but leave less than a tenth of the memory free.
        pace: Time of a step; None if unknown.
    """

    training: Training
    needs: Sequence[Need]
    broken: Sequence[Need]
    tight: Sequence[Need]
    pace: Pace | None

    @property
    def fits(self) -> bool:
        """Whether all needs fit."""
        return not self.broken


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A way to train that needs no storage.

    Args:
        name: Display name.
        owners: Bytes by owner, on each GPU or, without one, in host memory.
        available: Bytes available there.
        full_precision: Whether it trains all parameters with fp32 masters and state, as this package does.
    """

    name: str
    owners: Mapping[str, int]
    available: int
    full_precision: bool

    @property
    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.owners.values())

    @property
    def fits(self) -> bool:
        """Whether the memory is sufficient."""
        return self.total <= self.available


def make_plan(model: ModelFigures, training: Training, resources: Resources, rates: Rates) -> Plan:
    """Return the needs and the pace of a training.

    Args:
        model: The model.
        training: The training.
        resources: Resources of the machine.
        rates: Rates of the machine.
    """
    found = needs(model, training, on_gpu=resources.on_gpu, process_bytes=resources.process_bytes)
    return Plan(
        training=training,
        needs=found,
        broken=[need for need in found if not _has_room(need, resources)],
        tight=[need for need in found if _has_room(need, resources) and not _has_room(need, resources, share=TIGHT)],
        pace=pace(model, training, rates, on_gpu=resources.on_gpu),
    )


def cheapest(model: ModelFigures, training: Training, resources: Resources, rates: Rates) -> Plan | None:
    """Return the fastest plan that fits, or None.

    A plan that leaves less than a tenth of the memory free is chosen only if no roomier plan fits with the same state
    format and precision.

    Changes are tried in this order, and each only if the earlier ones are not enough: another place to build the model,
    other places for parameters and gradients, and activation checkpoints; training that waits for its checkpoints, and
    writes all state in every step, which needs less storage; smaller micro-batches; a smaller state format, which
    changes results a little; bf16 instead of fp32. The tokens per step and the optimizer never change.

    Args:
        model: The model.
        training: The training as asked.
        resources: Resources of the machine.
        rates: Rates of the machine.
    """
    for formed in _formed(training):
        for share in (TIGHT, 1.0):
            for candidates in _stages(model, formed, on_gpu=resources.on_gpu):
                fitting = [one for one in candidates if fits(model, one, resources, share=share)]
                if fitting:
                    beside = partial(seconds_beside_update, model, rates=rates, on_gpu=resources.on_gpu)
                    return make_plan(model, with_pinned(model, min(fitting, key=beside), resources), resources, rates)
    return None


def nearest(model: ModelFigures, training: Training, resources: Resources, rates: Rates) -> Plan:
    """Return the plan, of those that :func:`cheapest` tries, with the smallest :func:`lack`.

    Args:
        model: The model.
        training: The training as asked.
        resources: Resources of the machine.
        rates: Rates of the machine.
    """
    tried = (
        one
        for formed in _formed(training)
        for candidates in _stages(model, formed, on_gpu=resources.on_gpu)
        for one in candidates
    )
    return make_plan(model, min(tried, key=partial(lack, model, resources)), resources, rates)


def fits(model: ModelFigures, training: Training, resources: Resources, *, share: float = 1.0) -> bool:
    """Return whether a training fits into the disk and into this share of the memory."""
    found = needs(model, training, on_gpu=resources.on_gpu, process_bytes=resources.process_bytes)
    return all(_has_room(need, resources, share=share) for need in found)


def _has_room(need: Need, resources: Resources, *, share: float = 1.0) -> bool:
    # Bytes on the disk are known exactly, so they need no margin.
    return need.total <= resources.has(need.place) * (1.0 if need.place is MemoryKind.DISK else share)


def with_pinned(model: ModelFigures, training: Training, resources: Resources) -> Training:
    """Pin the frozen parameters in host memory, so that copies to the GPU are asynchronous, if they are few enough.

    Without frozen parameters there is nothing to gain: DeepSpeed pins trained ones in any case.
    """
    pinned = training.processes * pinned_partition_bytes(model, training)
    may_pin = training.offload_param == "cpu" and resources.on_gpu and model.frozen
    if not may_pin or pinned > PINNED_SHARE * resources.host_memory:
        return training
    with_pins = replace(training, pin_memory=True)
    return with_pins if fits(model, with_pins, resources) else training


def lack(model: ModelFigures, resources: Resources, training: Training) -> float:
    """Return the missing resources as a sum of shares of the available ones.

    It is rounded to two digits, so that of almost equal trainings the first one wins.
    """
    found = needs(model, training, on_gpu=resources.on_gpu, process_bytes=resources.process_bytes)
    return round(sum(max(0.0, need.total / max(1, resources.has(need.place)) - 1.0) for need in found), 2)


def _formed(asked: Training) -> Iterator[Training]:
    """Yield the training with ever smaller state formats, and then in a smaller precision."""
    precisions = [asked.precision] + (["bf16-mixed"] if asked.precision == "32-true" else [])
    for precision in precisions:
        start = replace(asked, precision=precision, state_format="fp32") if precision != asked.precision else asked
        for state_format in dict.fromkeys([start.state_format, *_smaller(start)]):
            yield replace(start, state_format=state_format)


def _stages(model: ModelFigures, formed: Training, *, on_gpu: bool) -> Iterator[list[Training]]:
    """Yield lists of settings with one state format; each later list compromises more."""
    for one in _divided(formed):
        yield [*_placed(model, one, on_gpu=on_gpu)]
        if one.saves_beside or one.writes_back:
            interval = None if one.writes_back else one.interval
            yield [*_placed(model, replace(one, asynchronous=False, interval=interval), on_gpu=on_gpu)]


def _smaller(training: Training) -> list[str]:
    """Return the state formats smaller than the training's, from precise to small."""
    names = [name for name in _FORMATS if training.suits(name)]
    at = names.index(training.state_format) if training.state_format in names else len(names)
    return names[at + 1 :]


def _divided(training: Training) -> Iterator[Training]:
    """Yield the training with ever smaller micro-batches, down to one sequence, and correspondingly more of them."""
    yield training
    while training.batch > 1:
        factor = next((n for n in range(2, isqrt(training.batch) + 1) if training.batch % n == 0), training.batch)
        training = replace(training, batch=training.batch // factor, accumulate=factor * training.accumulate)
        yield training


def gradient_budgets(model: ModelFigures, training: Training) -> list[int]:
    """Return the budgets of gradients to try, each at least the smallest that the update accepts."""
    least = least_gradient_budget(model, training)
    return [max(least, budget) for budget in BUDGETS]


def parameter_budgets(model: ModelFigures, training: Training, *, on_gpu: bool) -> list[int]:
    """Return the budgets of parameters to try, each at least twice the least one, to leave room for reading ahead."""
    least = 2 * least_parameter_budget(model, training, on_gpu=on_gpu)
    return list(dict.fromkeys([*(budget for budget in BUDGETS if budget >= least), max(BUDGETS[-1], least)]))


def _placed(model: ModelFigures, training: Training, *, on_gpu: bool) -> Iterator[Training]:
    """Yield the training with parameters and gradients in other places; those with more in memory come first."""
    placed = [
        replace(training, offload_param=name, parameter_budget=None) for name in OFFLOADS if on_gpu or name != "cpu"
    ]
    placed += [
        replace(training, offload_param="nvme", parameter_budget=budget)
        for budget in parameter_budgets(model, training, on_gpu=on_gpu)
    ]
    builds = dict.fromkeys([training.build, "configure_model"])
    checkpoints = dict.fromkeys([training.checkpointing, True])
    spilling = [] if training.compression else gradient_budgets(model, training)
    budgets = dict.fromkeys([training.gradient_budget, *spilling])
    for one, build, checkpointing, budget in product(placed, builds, checkpoints, budgets):
        yield replace(one, build=build, checkpointing=checkpointing, gradient_budget=budget)


def alternatives(model: ModelFigures, training: Training, resources: Resources) -> list[Alternative]:
    """Return ways to train in memory, from those with fp32 parameters and state to the one that compromises most.

    Args:
        model: The model.
        training: The training as asked.
        resources: Resources of the machine.
    """
    gpus = max(1, resources.num_gpus) * training.nodes
    activations = activation_owners(model, training)
    state_bytes = _FP32_BYTES * (training.num_arrays - 1)  # the parameters themselves are the master
    plain = _in_memory(model, _FP32_BYTES, state_bytes)
    # Autocast keeps its 16-bit copies of weights for backward.
    cast = {} if training.item_bytes == _FP32_BYTES else {"weights cast to 16 bit": _BF16_BYTES * model.trained_numel}
    found: list[tuple[str, dict[str, int], bool]] = []
    if gpus == 1:
        found.append((f"{training.optimizer} in memory", plain | cast | activations, True))
    else:
        buckets = {"gradient buckets": _FP32_BYTES * model.trained_numel}
        found.append((f"{training.optimizer} in memory (DDP)", plain | cast | buckets | activations, True))
        sharded = {owner: nbytes // gpus for owner, nbytes in plain.items()}
        # The parameters of two layers, and the gradients of one.
        layer = max(model.largest_module, model.numel // model.num_layers)
        gathered = {"gathered layers": _GATHERED_BY_FSDP * training.item_bytes * layer}
        found.append((f"FSDP over {gpus} GPUs", sharded | gathered | activations, True))
    adapters = int(_LORA * model.numel)
    adapted = ModelFigures(name=model.name, trained=(adapters,), frozen=(model.numel,))
    found += [
        ("8-bit AdamW, weights in bf16", _in_memory(model, _BF16_BYTES, _ADAM_8_BIT_BYTES) | activations, False),
        ("LoRA with 1 % of the parameters", _in_memory(adapted, _FP32_BYTES, _ADAM_BYTES) | activations, False),
    ]
    available = resources.gpu_memory if resources.gpu_memory is not None else resources.host_memory
    base = {"CUDA context": CUDA_CONTEXT_BYTES} if resources.on_gpu else {"process": resources.process_bytes}
    return [
        Alternative(name=name, owners=base | owners, available=available, full_precision=full)
        for name, owners, full in found
    ]


def _in_memory(model: ModelFigures, item_bytes: int, state_bytes: int) -> dict[str, int]:
    owners = {
        "parameters": item_bytes * model.trained_numel,
        "gradients": item_bytes * model.trained_numel,
        "optimizer state": state_bytes * model.trained_numel,
    }
    frozen = {"frozen parameters": _BF16_BYTES * sum(model.frozen)} if model.frozen else {}
    return owners | frozen
