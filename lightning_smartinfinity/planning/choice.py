"""Whether a training fits, the cheapest settings that do, and what would need no storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isqrt

from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.needs import (
    CUDA_CONTEXT_BYTES,
    PROCESS_BYTES,
    Need,
    Place,
    activation_owners,
    least_gradient_budget,
    least_parameter_budget,
    needs,
)
from lightning_smartinfinity.planning.pace import Pace, Rates, pace, seconds_beside_update
from lightning_smartinfinity.planning.training import OFFLOADS, Training

__all__ = [
    "BUDGETS",
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
]

_BF16_BYTES, _FP32_BYTES, _ADAM_BYTES, _ADAM_8_BIT_BYTES = 2, 4, 8, 2
_GATHERED_BY_FSDP = 3
_LORA = 0.01  # part of the parameters that adapters usually have
_FORMATS = ("fp32", "bf16", "int8")

BUDGETS = (4 * 10**9, 10**9, 256 * 10**6)
"""Bytes of gradients, and of parameters, that are tried where not all of them fit, from roomy to small."""

TIGHT = 0.9
"""Share of what there is above which a need is tight: plans are right to 10 %."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The memory, the disk and the processors of a machine.

    Args:
        host_memory: Bytes of host memory that processes may use.
        disk: Bytes free on the disk of the storage folder.
        cores: Number of CPU cores.
        gpu_memory: Bytes of each GPU; None if there is no GPU.
        num_gpus: Number of GPUs.
        drive_bytes: Size of the drive in bytes.
        process_bytes: Host memory of a process before it trains.
    """

    host_memory: int
    disk: int
    cores: int = 1
    gpu_memory: int | None = None
    num_gpus: int = 0
    drive_bytes: int = 0
    process_bytes: int = PROCESS_BYTES

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.gpu_memory is not None

    def has(self, place: Place) -> int:
        """Return the bytes that are there."""
        return {Place.GPU: self.gpu_memory or 0, Place.HOST: self.host_memory, Place.DISK: self.disk}[place]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The bytes and the seconds that a training needs.

    Args:
        training: The training.
        needs: Bytes by place and phase.
        broken: Those of the needs that are more than there is.
        tight: Those of the needs that fit into memory, and leave less than a tenth of it.
        pace: Time of a step; None if unknown.
    """

    training: Training
    needs: Sequence[Need]
    broken: Sequence[Need]
    tight: Sequence[Need]
    pace: Pace | None

    @property
    def fits(self) -> bool:
        """Whether there is enough of everything."""
        return not self.broken


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A way to train that needs no storage.

    Args:
        name: Name for people.
        owners: Bytes by owner, on each GPU or, without one, in host memory.
        available: Bytes that are there.
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
        """Whether there is enough memory."""
        return self.total <= self.available


def make_plan(model: ModelFigures, training: Training, resources: Resources, rates: Rates) -> Plan:
    """Return the needs and the pace of a training.

    Args:
        model: The model.
        training: The training.
        resources: What the machine has.
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

    A plan that leaves less than a tenth of the memory is taken only if no other does with the same format of the state
    and the same precision.

    It may change where the model is built and where parameters and gradients lie, and turn activation checkpoints on.
    Only if this is not enough, it lets training wait for its checkpoints, which takes less storage. Then it divides the
    batch into micro-batches, uses a smaller state format, which changes results a little, and at last bf16 instead of
    fp32. Neither the tokens of a step nor the optimizer change.

    Args:
        model: The model.
        training: The training as asked.
        resources: What the machine has.
        rates: Rates of the machine.
    """
    for formed in _formed(training):
        for share in (TIGHT, 1.0):
            for candidates in _stages(model, formed, on_gpu=resources.on_gpu):
                fitting = [one for one in candidates if fits(model, one, resources, share=share)]
                if fitting:
                    beside = partial(seconds_beside_update, model, rates=rates, on_gpu=resources.on_gpu)
                    return make_plan(model, min(fitting, key=beside), resources, rates)
    return None


def nearest(model: ModelFigures, training: Training, resources: Resources, rates: Rates) -> Plan:
    """Return the plan that lacks the least of what :func:`cheapest` tries, as a share of what there is.

    Args:
        model: The model.
        training: The training as asked.
        resources: What the machine has.
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
    """Return whether there is enough of everything for a training, and whether this share of the memory is enough."""
    found = needs(model, training, on_gpu=resources.on_gpu, process_bytes=resources.process_bytes)
    return all(_has_room(need, resources, share=share) for need in found)


def _has_room(need: Need, resources: Resources, *, share: float = 1.0) -> bool:
    # What lies on a disk is known to the byte.
    return need.total <= resources.has(need.place) * (1.0 if need.place is Place.DISK else share)


def lack(model: ModelFigures, resources: Resources, training: Training) -> float:
    """Return what a training lacks, as shares of what there is, to two digits: the first of many counts."""
    found = needs(model, training, on_gpu=resources.on_gpu, process_bytes=resources.process_bytes)
    return round(sum(max(0.0, need.total / max(1, resources.has(need.place)) - 1.0) for need in found), 2)


def _formed(asked: Training) -> Iterator[Training]:
    """Yield the training with smaller state, and then in a smaller precision: later ones give up more."""
    precisions = [asked.precision] + (["bf16-mixed"] if asked.precision == "32-true" else [])
    for precision in precisions:
        start = replace(asked, precision=precision, state_format="fp32") if precision != asked.precision else asked
        for state_format in dict.fromkeys([start.state_format, *_smaller(start)]):
            yield replace(start, state_format=state_format)


def _stages(model: ModelFigures, formed: Training, *, on_gpu: bool) -> Iterator[list[Training]]:
    """Yield lists of settings with one format of the state; those of a later list give up more."""
    for one in _divided(formed):
        yield [*_placed(model, one, on_gpu=on_gpu)]
        if one.saves_beside:
            yield [*_placed(model, replace(one, asynchronous=False), on_gpu=on_gpu)]


def _smaller(training: Training) -> list[str]:
    """Return state formats that may follow that of the training, from precise to small."""
    names = [name for name in _FORMATS if training.suits(name)]
    at = names.index(training.state_format) if training.state_format in names else len(names)
    return names[at + 1 :]


def _divided(training: Training) -> Iterator[Training]:
    """Yield the training with ever smaller batches, down to single sequences, and with as many more micro-batches."""
    yield training
    while training.batch > 1:
        factor = next((n for n in range(2, isqrt(training.batch) + 1) if training.batch % n == 0), training.batch)
        training = replace(training, batch=training.batch // factor, accumulate=factor * training.accumulate)
        yield training


def gradient_budgets(model: ModelFigures, training: Training) -> list[int]:
    """Return the budgets of gradients to try: none is less than the update accepts."""
    least = least_gradient_budget(model, training)
    return [max(least, budget) for budget in BUDGETS]


def parameter_budgets(model: ModelFigures, training: Training, *, on_gpu: bool) -> list[int]:
    """Return the budgets of parameters to try: none is less than the largest module needs with room to read ahead."""
    least = 2 * least_parameter_budget(model, training, on_gpu=on_gpu)
    return list(dict.fromkeys([*(budget for budget in BUDGETS if budget >= least), max(BUDGETS[-1], least)]))


def _placed(model: ModelFigures, training: Training, *, on_gpu: bool) -> Iterator[Training]:
    """Yield the training with parameters and gradients in other places; of equally fast ones the roomier come first."""
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
    """Return the ways to train in memory, from those that keep fp32 parameters and state to the one that gives up most.

    Args:
        model: The model.
        training: The training as asked.
        resources: What the machine has.
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
        # Of two layers the parameters, and of one the gradients.
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
