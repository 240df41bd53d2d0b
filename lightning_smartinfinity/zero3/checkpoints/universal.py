"""Resumes from a universal checkpoint on any number of processes, however many saved it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, LOSS_SCALER

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.transfer.layout import ParameterSlice, PartitionLayout
from lightning_smartinfinity.transfer.windows import Window
from lightning_smartinfinity.zero3.checkpoints.client_state import user_state
from lightning_smartinfinity.zero3.checkpoints.folder_check import (
    check_frozen,
    check_needed,
    reading_checkpoint,
)
from lightning_smartinfinity.zero3.checkpoints.loss_scale import loss_scaler_of
from lightning_smartinfinity.zero3.checkpoints.optimizer_state import loading_state
from lightning_smartinfinity.zero3.checkpoints.saved_residual import begin_residual
from lightning_smartinfinity.zero3.checkpoints.stock_checkpoint import check_groups
from lightning_smartinfinity.zero3.checkpoints.universal_folder import MASTER_FILE, UniversalFolder
from lightning_smartinfinity.zero3.checkpoints.weight_loading import check_names
from lightning_smartinfinity.zero3.collectives import raising_together
from lightning_smartinfinity.zero3.parameter_groups import saved_numbers
from lightning_smartinfinity.zero3.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState, ZeroParameter

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine import SmartInfinityEngine

__all__ = ["load_universal"]


def load_universal(
    engine: SmartInfinityEngine, path: str | Path, *, strict: bool, needed: Collection[str] = ()
) -> ClientState:
    """Load a universal checkpoint into an engine that trains, to resume from it.

    This is a collective: if one rank finds a fault, every rank raises before anything is changed.

    Args:
        engine: Engine of this strategy.
        path: The folder that ``smart-infinity universal`` or DeepSpeed's ``ds_to_universal`` wrote.
        strict: Whether buffers have to match exactly.
        needed: Keys that must have been saved beside the model.

    Returns:
        The state that was saved beside the model.

    Raises:
        CheckpointError: The checkpoint belongs to another model, optimizer or precision, or is damaged.
    """
    folder = UniversalFolder(Path(path), rank=dist.get_rank(), world_size=dist.get_world_size())
    optimizer = engine.optimizer

    @contextmanager
    def together() -> Iterator[None]:
        with raising_together(optimizer.dp_process_group), reading_checkpoint(folder.path):
            yield

    with together():
        folder.check_states(with_optimizer=True)
        check_needed(folder.model_states, needed, folder.path)
        _check_model(engine, folder)
        if strict:
            check_frozen(engine.module, folder.model_states, folder.path)
            _check_buffers(engine.module, folder)
        _check_optimizer(optimizer, folder)
        _check_numbers(folder)
        saved_steps = folder.steps
        steps = np.array(
            [saved_steps[parameter.name] for parameter in optimizer.partition.layout.parameters], dtype=np.int64
        )
        _check_files(optimizer, folder)
        folder.check_arrays(_files_of(optimizer, folder))
        frozen = _frozen_slices(engine, folder)
    optimizer.checkpoint_event_prologue()
    with loading_state(optimizer, _filler(optimizer, folder)) as fill:
        optimizer.update.drained_handler().state.replace(fill, steps=steps, together=together)
    begin_residual(optimizer)
    checkpoint = {"module": folder.model_states["module"], FROZEN_PARAM_FRAGMENTS: frozen}
    with together():
        engine.load_module_state_dict(checkpoint=checkpoint, strict=strict)
    optimizer.checkpoint_event_epilogue()
    _restore_optimizer(optimizer, folder)
    _restore_counters(engine, folder.model_states)
    return user_state(folder.model_states)


# ---- filling this rank's partition


def _files_of(optimizer: StorageOptimizer, folder: UniversalFolder) -> dict[str, int]:
    """Return the array number of each of a parameter's files; arrays without a file start from their first values."""
    kept = optimizer.rule.kept_arrays(folder.param_groups) if folder.arrays else ()
    return {MASTER_FILE: 0} | {name: optimizer.rule.arrays.index(name) for name in kept}


def _filler(optimizer: StorageOptimizer, folder: UniversalFolder) -> Callable[[Window], None]:
    layout = optimizer.partition.layout
    rank = dist.get_rank(optimizer.dp_process_group)
    shapes = folder.shapes
    files, first_values = _files_of(optimizer, folder), optimizer.first_values
    opened: dict[tuple[str, str], torch.Tensor] = {}

    def array_of(parameter: ParameterSlice, file: str) -> torch.Tensor:
        key = (parameter.name, file)
        if key not in opened:
            # Windows come in partition order: only the last parameter of a window can be in the next one.
            for other in [other for other in opened if other[0] != parameter.name]:
                del opened[other]
            opened[key] = folder.tensor(*key, numel=shapes[parameter.name].numel())
        return opened[key]

    def fill(window: Window) -> None:
        for array in window.arrays:
            array.fill(0)
        for parameter, begin, end in _parameters_in(layout, window):
            target = slice(begin - window.begin, end - window.begin)
            first = rank * parameter.numel + begin - parameter.offset
            for number, first_value in enumerate(first_values, start=1):
                window.arrays[number][target] = first_value
            for file, number in files.items():
                window.arrays[number][target] = folder.values(
                    array_of(parameter, file), parameter.name, file, first, first + end - begin
                )
        optimizer.partition.write(window.begin, torch.from_numpy(window.arrays[0]))

    return fill


def _parameters_in(layout: PartitionLayout, window: Window) -> list[tuple[ParameterSlice, int, int]]:
    """Return a window's parameters, each with its range ``[begin, end)`` of the partition, without padding."""
    ranges = [
        (parameter, max(window.begin, parameter.offset), min(window.end, parameter.offset + parameter.real_numel))
        for parameter in layout.parameters_between(window.begin, window.end)
    ]
    return [(parameter, begin, end) for parameter, begin, end in ranges if begin < end]


def _frozen_slices(engine: SmartInfinityEngine, folder: UniversalFolder) -> dict[str, torch.Tensor] | None:
    """Return this rank's slice of every frozen parameter, padded as ZeRO-3 pads it."""
    saved = folder.frozen_shapes()
    if saved is None:
        return None
    rank, slices = dist.get_rank(), {}
    for param, name in engine.param_names.items():
        if name in saved:
            numel = param.partition_numel()
            begin, end = (min(edge * numel, param.ds_numel) for edge in (rank, rank + 1))
            values = folder.frozen(name, begin, end)
            slices[name] = torch.nn.functional.pad(values, (0, numel - len(values)))
    return slices


def _restore_optimizer(optimizer: StorageOptimizer, folder: UniversalFolder) -> None:
    states = folder.optimizer_states
    saved_groups = folder.param_groups
    for number, saved in zip(saved_numbers(optimizer, saved_groups), saved_groups, strict=True):
        group = optimizer.optimizer.param_groups[number]
        # Stock DeepSpeed's own optimizers have settings that torch's lack.
        group.update({key: value for key, value in saved.items() if key in group and key != "params"})
    optimizer.loss_scaler = loss_scaler_of(states[LOSS_SCALER])
    optimizer.dynamic_loss_scale = states["dynamic_loss_scale"]
    optimizer.overflow = states["overflow"]


def _restore_counters(engine: SmartInfinityEngine, states: SavedState) -> None:
    engine.global_steps = states["global_steps"]
    engine.global_samples = states.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = states["skipped_steps"]


# ---- checks of model and optimizer


def _check_model(engine: SmartInfinityEngine, folder: UniversalFolder) -> None:
    present = {name: shape for group in engine._get_zero_param_shapes() for name, shape in group.items()}
    check_names(present, folder.shapes, folder.path)
    saved = folder.frozen_shapes()
    if saved is not None:
        check_names(engine._get_zero_frozen_param_attributes(engine._get_param_shape_func), saved, folder.path)


def _check_buffers(module: torch.nn.Module, folder: UniversalFolder) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False)).keys()
    here, there = module.state_dict().keys() - parameters, folder.model_states["module"].keys() - parameters
    if here != there:
        raise CheckpointError(
            f"The buffers of {folder.path} differ from the model's: {sorted(here ^ there)[0]!r} is missing "
            f"{'there' if here - there else 'here'}.",
            "Build the model as it was when the checkpoint was saved, or load with strict_loading=False in the module.",
        )


def _check_optimizer(optimizer: StorageOptimizer, folder: UniversalFolder) -> None:
    extra, dtype = folder.extra, _saved_dtype(folder)
    if extra is not None and extra["optimizer"] != optimizer.rule.name:
        raise CheckpointError(
            f"{folder.path} was saved with {extra['optimizer']}, the model is configured with {optimizer.rule.name}.",
            "Train with the same optimizer.",
        )
    if extra is None:
        check_groups(optimizer, folder.param_groups)
    kept = optimizer.rule.kept_arrays(folder.param_groups)
    if set(folder.arrays) not in (set(), set(kept)):
        raise CheckpointError(
            f"{folder.path} holds {', '.join(folder.arrays)}, {optimizer.rule.name} keeps {', '.join(kept)}.",
            "Train with the optimizer that it was saved with.",
        )
    if dtype != str(optimizer.dtype):
        raise CheckpointError(
            f"The parameters of {folder.path} are {dtype}, this run's are {optimizer.dtype}.",
            "Use the precision that it was saved with.",
        )
    folder.check_save()
    names = [{optimizer.param_names[param] for param in group} for group in _params_of_groups(optimizer)]
    saved = folder.param_groups
    if [set(group["params"]) for group in saved] != [names[number] for number in saved_numbers(optimizer, saved)]:
        raise CheckpointError(
            f"The optimizer of {folder.path} has other parameter groups than this one.",
            "Give the optimizer the same parameter groups.",
        )


def _saved_dtype(folder: UniversalFolder) -> str:
    if folder.extra is not None:
        return str(folder.extra["dtype"])
    config = folder.model_states["ds_config"]
    enabled = [section for section in ("fp16", "bf16") if config.get(section, {}).get("enabled")]
    return {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[enabled[0]] if enabled else "torch.float32"


def _params_of_groups(optimizer: StorageOptimizer) -> list[list[ZeroParameter]]:
    groups: list[list[ZeroParameter]] = [[] for _ in optimizer.optimizer.param_groups]
    for sub_group, params in enumerate(optimizer.fp16_groups):
        groups[optimizer.sub_group_to_group_id[sub_group]] += params
    return groups


def _check_numbers(folder: UniversalFolder) -> None:
    """Check what is restored after the arrays, so that a fault is found before anything is loaded."""
    states, needed = folder.optimizer_states, {"dynamic_loss_scale", "overflow", LOSS_SCALER}
    missing = sorted(needed - states.keys())
    counters = {name: folder.model_states.get(name) for name in ("global_steps", "skipped_steps")}
    counters["global_samples"] = folder.model_states.get("global_samples", 0)
    wrong = [name for name, value in counters.items() if not isinstance(value, int)]
    if missing or wrong:
        raise CheckpointError(
            f"{folder.path} holds no usable {', '.join(map(repr, missing + wrong))}.", "Convert one checkpoint again."
        )
    loss_scaler_of(states[LOSS_SCALER])


def _check_files(optimizer: StorageOptimizer, folder: UniversalFolder) -> None:
    shapes = folder.shapes
    for parameter in optimizer.partition.layout.parameters:
        for file in _files_of(optimizer, folder):
            folder.tensor(parameter.name, file, numel=shapes[parameter.name].numel())
