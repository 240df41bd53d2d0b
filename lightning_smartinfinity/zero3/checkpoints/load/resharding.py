"""Resumes a training on any number of processes, regardless of how many saved it.

Every rank reads its slices of the saved arrays window by window, through :class:`SavedTraining`: from the processes'
files of an ordinary checkpoint, or from the files of a universal one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, LOSS_SCALER

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import loss_scaler_of, user_state
from lightning_smartinfinity.zero3.checkpoints.formats.optimizer_state import check_extra, loading_state, restore_groups
from lightning_smartinfinity.zero3.checkpoints.formats.saved_residual import begin_residual
from lightning_smartinfinity.zero3.checkpoints.formats.saved_training import MASTERS, SavedTraining
from lightning_smartinfinity.zero3.checkpoints.formats.stock_checkpoint import check_groups
from lightning_smartinfinity.zero3.checkpoints.load.folder_check import check_frozen, check_needed
from lightning_smartinfinity.zero3.checkpoints.load.weight_loading import check_names
from lightning_smartinfinity.zero3.optimizer.parameter_groups import saved_numbers
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState, ZeroEngine, ZeroParameter

__all__ = ["load_resharded"]


def load_resharded(
    engine: ZeroEngine, saved: SavedTraining, *, strict: bool, needed: Collection[str] = ()
) -> ClientState:
    """Load a checkpoint into an engine that trains, to resume from it.

    This is a collective: if one rank finds a fault, every rank raises before anything is changed.

    Args:
        engine: Engine of this strategy.
        saved: The checkpoint, opened by this rank; this function closes it.
        strict: Whether buffers must match exactly.
        needed: Keys that must have been saved with the model.

    Returns:
        The state that was saved with the model.

    Raises:
        CheckpointError: The checkpoint belongs to another model, optimizer or precision, or is damaged.
    """
    optimizer = engine.optimizer

    @contextmanager
    def together() -> Iterator[None]:
        with raising_together(optimizer.dp_process_group), reading_checkpoint(saved.path):
            yield

    with closing(saved):
        with together():
            _check(engine, saved, strict=strict, needed=needed)
            updates = saved.steps
            steps = np.array([updates[parameter.name] for parameter in optimizer.partition.layout.parameters], np.int64)
            numbers = _numbers_of(optimizer, saved)
            share = saved.check_arrays(numbers)
        shares = gather(share, optimizer.dp_process_group)
        saved.begin_reading({array: checksums for found in shares for array, checksums in found.items()})
        optimizer.checkpoint_event_prologue()
        with loading_state(optimizer, _filler(optimizer, saved, numbers)) as fill:
            optimizer.update.drained_handler().state.replace(fill, steps=steps, together=together)
    begin_residual(optimizer)
    frozen = None if saved.frozen_shapes() is None else _FrozenSlices(engine, saved)
    checkpoint = {"module": saved.module, FROZEN_PARAM_FRAGMENTS: frozen}
    with together():
        engine.load_module_state_dict(checkpoint=checkpoint, strict=strict)
    optimizer.checkpoint_event_epilogue()
    _restore_optimizer(optimizer, saved)
    _restore_counters(engine, saved.model_states)
    return user_state(saved.model_states)


# ---- filling this rank's partition


def _numbers_of(optimizer: StorageOptimizer, saved: SavedTraining) -> dict[str, int]:
    """Return the rule's number of each saved array by name; other arrays start from their first values."""
    kept = optimizer.rule.kept_arrays(saved.param_groups) if saved.arrays else ()
    return {MASTERS: 0} | {name: optimizer.rule.arrays.index(name) for name in kept}


def _filler(optimizer: StorageOptimizer, saved: SavedTraining, numbers: Mapping[str, int]) -> Callable[[Window], None]:
    layout = optimizer.partition.layout
    rank = dist.get_rank(optimizer.dp_process_group)
    first_values = optimizer.first_values

    def fill(window: Window) -> None:
        for array in window.arrays:
            array.fill(0)
        for parameter, begin, end in layout.real_ranges_between(window.begin, window.end):
            target = slice(begin - window.begin, end - window.begin)
            first = rank * parameter.numel + begin - parameter.offset
            for number, first_value in enumerate(first_values, start=1):
                window.arrays[number][target] = first_value
            for name, number in numbers.items():
                saved.read(parameter.name, name, first, window.arrays[number][target])
        optimizer.partition.write(window.begin, torch.from_numpy(window.arrays[0]))

    return fill


class _FrozenSlices:
    """This rank's slice of every frozen parameter, padded as in ZeRO-3; each is read when it is looked up.

    Args:
        engine: Engine of this strategy.
        saved: The checkpoint.
    """

    def __init__(self, engine: ZeroEngine, saved: SavedTraining) -> None:
        self._saved = saved
        self._params: dict[str, ZeroParameter] = {name: param for param, name in engine.param_names.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        rank, numel, whole = dist.get_rank(), self._params[name].partition_numel(), self._params[name].ds_numel
        values = self._saved.frozen(name, *(min(edge * numel, whole) for edge in (rank, rank + 1)))
        return torch.nn.functional.pad(values, (0, numel - len(values)))


def _restore_optimizer(optimizer: StorageOptimizer, saved: SavedTraining) -> None:
    states = saved.optimizer_states
    restore_groups(optimizer, saved.param_groups, ours=saved.extra is not None)
    optimizer.loss_scaler = loss_scaler_of(states[LOSS_SCALER])
    optimizer.dynamic_loss_scale = states["dynamic_loss_scale"]
    optimizer.overflow = states["overflow"]


def _restore_counters(engine: ZeroEngine, states: SavedState) -> None:
    engine.global_steps = states["global_steps"]
    engine.global_samples = states.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = states["skipped_steps"]


# ---- checks of model and optimizer


def _check(engine: ZeroEngine, saved: SavedTraining, *, strict: bool, needed: Collection[str]) -> None:
    saved.check_states()
    check_needed(saved.model_states, needed, saved.path)
    _check_model(engine, saved)
    if strict:
        check_frozen(engine.module, saved.model_states, saved.path)
        _check_buffers(engine.module, saved)
    _check_optimizer(engine.optimizer, saved)
    _check_numbers(saved)


def _check_model(engine: ZeroEngine, saved: SavedTraining) -> None:
    present = {name: shape for group in engine._get_zero_param_shapes() for name, shape in group.items()}
    check_names(present, saved.shapes, saved.path)
    frozen = saved.frozen_shapes()
    if frozen is not None:
        check_names(engine._get_zero_frozen_param_attributes(engine._get_param_shape_func), frozen, saved.path)
        for name in frozen:
            saved.frozen(name, 0, 0)  # raises if the values are missing


def _check_buffers(module: torch.nn.Module, saved: SavedTraining) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False)).keys()
    here, there = module.state_dict().keys() - parameters, saved.module.keys() - parameters
    if here != there:
        raise CheckpointError(
            f"The buffers of {saved.path} differ from the model's: {sorted(here ^ there)[0]!r} is missing "
            f"{'there' if here - there else 'here'}.",
            "Build the model as it was when the checkpoint was saved, or load with strict_loading=False in the module.",
        )


def _check_optimizer(optimizer: StorageOptimizer, saved: SavedTraining) -> None:
    if saved.extra is None:
        check_groups(optimizer, saved.param_groups)
        _check_dtype(optimizer, saved)
    else:
        check_extra(optimizer, saved.extra, saved.path)
    kept = optimizer.rule.kept_arrays(saved.param_groups)
    if set(saved.arrays) not in (set(), set(kept)):
        raise CheckpointError(
            f"{saved.path} holds {', '.join(saved.arrays)}, {optimizer.rule.name} keeps {', '.join(kept)}.",
            "Train with the optimizer that it was saved with.",
        )
    names = [{optimizer.param_names[param] for param in group} for group in _params_of_groups(optimizer)]
    groups = saved.param_groups
    if [set(group["params"]) for group in groups] != [names[number] for number in saved_numbers(optimizer, groups)]:
        raise CheckpointError(
            f"The optimizer of {saved.path} has other parameter groups than this one.",
            "Give the optimizer the same parameter groups.",
        )


def _check_dtype(optimizer: StorageOptimizer, saved: SavedTraining) -> None:
    """Check that a checkpoint of stock DeepSpeed has this run's precision."""
    config = saved.model_states["ds_config"]
    enabled = [section for section in ("fp16", "bf16") if config.get(section, {}).get("enabled")]
    dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[enabled[0]] if enabled else "torch.float32"
    if dtype != str(optimizer.dtype):
        raise CheckpointError(
            f"The parameters of {saved.path} are {dtype}, this run's are {optimizer.dtype}.",
            "Use the precision that it was saved with.",
        )


def _params_of_groups(optimizer: StorageOptimizer) -> list[list[ZeroParameter]]:
    groups: list[list[ZeroParameter]] = [[] for _ in optimizer.optimizer.param_groups]
    for sub_group, params in enumerate(optimizer.fp16_groups):
        groups[optimizer.sub_group_to_group_id[sub_group]] += params
    return groups


def _check_numbers(saved: SavedTraining) -> None:
    """Check the values that are restored after the arrays, so that a fault is found before anything is loaded."""
    states, needed = saved.optimizer_states, {"dynamic_loss_scale", "overflow", LOSS_SCALER}
    missing = sorted(needed - states.keys())
    counters = {name: saved.model_states.get(name) for name in ("global_steps", "skipped_steps")}
    counters["global_samples"] = saved.model_states.get("global_samples", 0)
    wrong = [name for name, value in counters.items() if not isinstance(value, int)]
    if missing or wrong:
        raise CheckpointError(f"{saved.path} holds no usable {', '.join(map(repr, missing + wrong))}.", saved.remedy)
    loss_scaler_of(states[LOSS_SCALER])
