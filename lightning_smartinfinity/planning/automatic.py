"""Chooses the settings that a user left open, from those that use the most memory to those that use the least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

from lightning_smartinfinity.pipeline.layout.free_memory import room_for_state
from lightning_smartinfinity.pipeline.layout.ring import ring_buffers, update_threads
from lightning_smartinfinity.planning.choice import (
    PINNED_SHARE,
    TIGHT,
    Plan,
    Resources,
    fits,
    gradient_budgets,
    lack,
    make_plan,
    parameter_budgets,
    with_pinned,
)
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.needs import (
    MemoryKind,
    activation_owners,
    needs,
    pinned_partition_bytes,
    state_bytes,
)
from lightning_smartinfinity.planning.needs_table import in_gb, needs_table
from lightning_smartinfinity.planning.pace import Rates, seconds_beside_update
from lightning_smartinfinity.planning.training import OFFLOADS, Training

__all__ = ["Open", "choose", "default_cache", "plan_in_words", "with_cache", "with_ring"]

_SMALL_BUCKET = 1024 * 1024
_GRAIN = 10**6


@dataclass(frozen=True, kw_only=True)
class Open:
    """The settings that :func:`choose` may choose.

    Args:
        offload_param: Whether to choose the place of parameters. With a budget of parameters it is always storage.
        parameter_budget: Whether to choose the bytes of parameters in memory.
        gradient_budget: Whether to choose the bytes of gradients in memory.
        cache_bytes: Whether to choose the bytes of state in host memory.
        bucket_numel: Whether to choose the size of the gradient bucket.
        state_formats: State formats to try after the training's own, in this order. Formats that do not suit the
            training are skipped.
    """

    offload_param: bool = True
    parameter_budget: bool = True
    gradient_budget: bool = True
    cache_bytes: bool = True
    bucket_numel: bool = True
    state_formats: Sequence[str] = ()


def choose(model: ModelFigures, training: Training, resources: Resources, rates: Rates, open_: Open) -> Plan:
    """Return the fastest plan that fits, with the first state format for which any plan fits.

    All combinations of the open settings are tried with one state format before the next one. Of equally fast plans,
    the one that holds the most in memory is chosen. The remaining host memory is used to cache state.

    Args:
        model: The model.
        training: The training, with all settings that are not open.
        resources: The resources that may be used.
        rates: Rates of the machine.
        open_: The settings to choose.

    Returns:
        The plan. If none fits, the one that lacks the least.
    """
    beside = partial(seconds_beside_update, model, rates=rates, on_gpu=resources.on_gpu)
    tried: list[Training] = []
    for state_format in dict.fromkeys([training.state_format, *filter(training.suits, open_.state_formats)]):
        of_format = replace(training, state_format=state_format)
        candidates = [*_settings(model, of_format, open_, on_gpu=resources.on_gpu)]
        fitting = [one for one in candidates if fits(model, one, resources)]
        if fitting:
            best = min(fitting, key=beside)
            best = with_pinned(model, best, resources) if open_.offload_param else best
            filled = with_cache(model, best, resources) if open_.cache_bytes else best
            return make_plan(model, filled, resources, rates)
        tried += candidates
    return make_plan(model, min(tried, key=partial(lack, model, resources)), resources, rates)


def _settings(model: ModelFigures, training: Training, open_: Open, *, on_gpu: bool) -> Iterator[Training]:
    is_open = open_.offload_param and training.parameter_budget is None
    offloads = OFFLOADS if is_open else (training.offload_param,)
    spilling = gradient_budgets(model, training) if open_.gradient_budget else []
    buckets = dict.fromkeys([training.bucket_numel, *([_SMALL_BUCKET] if open_.bucket_numel else [])])
    for offload, bucket in product(offloads, buckets):
        if offload == "cpu" and is_open and not on_gpu:
            continue
        held = [training.parameter_budget]
        if offload == "nvme" and open_.parameter_budget:
            held += parameter_budgets(model, training, on_gpu=on_gpu)
        for parameter_budget, gradient_budget in product(held, dict.fromkeys([training.gradient_budget, *spilling])):
            yield replace(
                training,
                offload_param=offload,
                bucket_numel=bucket,
                parameter_budget=parameter_budget,
                gradient_budget=gradient_budget,
            )


def with_cache(model: ModelFigures, training: Training, resources: Resources) -> Training:
    """Return the training with the state in memory that it keeps by default, or less if not so much fits.

    Without room on the disk for third places of the other state, all state is written in every step.

    Args:
        model: The model.
        training: The training without state in memory.
        resources: Resources of the machine.
    """
    free = int(TIGHT * resources.host_memory) - _held(model, training, resources)
    nbytes = min(default_cache(model, training, resources), max(0, free) // training.processes // _GRAIN * _GRAIN)
    cached = replace(training, cache_bytes=nbytes)
    in_every_step = replace(cached, interval=None)
    return in_every_step if fits(model, in_every_step, resources) and not fits(model, cached, resources) else cached


def with_ring(training: Training, resources: Resources) -> Training:
    """Return the training with the ring that it chooses by default.

    Args:
        training: The training.
        resources: Resources of the machine.
    """
    cores = resources.cores // training.processes
    number = ring_buffers(
        tasklet_bytes=training.tasklet_bytes,
        threads=update_threads(cores, on_gpu=resources.on_gpu),
        drives=resources.num_drives,
        processes=training.processes,
        margin=resources.margin,
    )
    return replace(training, num_buffers=number)


def default_cache(model: ModelFigures, training: Training, resources: Resources) -> int:
    """Return the bytes of state in memory that each process of a training chooses by itself.

    Activations use the memory that this choice leaves free. The result is rounded to megabytes.

    Args:
        model: The model.
        training: The training, with any state in memory.
        resources: Resources of the machine.
    """
    if resources.storage_is_memory:
        return 0
    beside = 0 if resources.on_gpu else training.processes * sum(activation_owners(model, training).values())
    room = room_for_state(
        resources.host_memory,
        margin=resources.margin,
        reserved=_held(model, training, resources) - beside,
        ranks=training.processes,
    )
    return min(room, state_bytes(model, training) + _GRAIN - 1) // _GRAIN * _GRAIN


def _held(model: ModelFigures, training: Training, resources: Resources) -> int:
    """Return the host memory of a training beside its state in memory."""
    # With any state in memory there are more slots.
    some = replace(training, cache_bytes=1)
    found = needs(model, some, on_gpu=resources.on_gpu, process_bytes=resources.process_bytes)
    # The state is kept in memory once the model is built, and what building took is free again.
    return max(need.total for need in found if need.place is MemoryKind.HOST and need.phase != "building")


def plan_in_words(
    model: ModelFigures, asked: Training, plan: Plan, resources: Resources, *, open_: Open, assumed: Sequence[str] = ()
) -> str:
    """Return a text with the chosen settings, and a table of their needs and the available resources.

    Args:
        model: The model.
        asked: The training before the choice.
        plan: The plan.
        resources: The resources that may be used.
        open_: The settings that were open.
        assumed: Assumptions about the training, in words.
    """
    before, after = asdict(asked), asdict(plan.training)
    if plan.training.interval != asked.interval:
        after["interval"] = "step"
    if open_.offload_param:
        before["offload_param"] = "none"  # so that it is listed even if a budget of parameters implies it
    passed = [name for name in open_.state_formats if not asked.suits(name)]
    over = f"passed over for {asked.optimizer} in {asked.precision}: {', '.join(passed)}" if passed else ""
    lines = [f"Plan for {model.name}, {model.numel / 1e9:.3f}B parameters, {asked.batch} x {asked.seq} tokens"]
    lines += [f"  {words}" for words in (model.assumed, *assumed, over) if words]
    if open_.offload_param and plan.training.offload_param == "cpu":
        before["pin_memory"], after["pin_memory"] = None, _pinning(model, plan.training, resources)
    changed = [f"  {_LABELS[name]:<38}{_shown(after[name])}" for name in _LABELS if after[name] != before[name]]
    lines += changed or ["  nothing has to be chosen: the defaults fit"]
    lines += ['  overlap                               as set; "auto" is measured in the first steps', ""]
    return "\n".join([*lines, *needs_table(plan, resources)])


_LABELS = {
    "state_format": "state_format",
    "offload_param": "zero offload_param device",
    "pin_memory": "zero offload_param pin_memory",
    "bucket_numel": "zero reduce_bucket_size",
    "parameter_budget": "transfer parameter_bytes",
    "gradient_budget": "transfer gradient_bytes",
    "cache_bytes": "transfer dram_cache_bytes",
    "interval": "transfer durability",
}


def _pinning(model: ModelFigures, training: Training, resources: Resources) -> str:
    if not model.frozen:
        return "False (trained parameters are pinned in any case)"
    nbytes = in_gb(training.processes * pinned_partition_bytes(model, training))
    most = in_gb(PINNED_SHARE * resources.host_memory)
    if training.pin_memory:
        return f"True ({nbytes} GB, of at most {most} GB)"
    return f"False (frozen parameters would pin {nbytes} GB: more than fits, or than {most} GB)"


def _shown(value: object) -> str:
    return f"{value} ({in_gb(value)} GB)" if isinstance(value, int) and value > _GRAIN else str(value)
