"""Loads a checkpoint's weights into an engine without the optimizer's state, to evaluate or to train further.

Names that the module's own hooks change are matched with the saved ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from lightning_smartinfinity.errors import CheckpointError, SmartInfinityError
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import user_state
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import SavedWeights
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder, is_universal
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from lightning_smartinfinity.zero3.checkpoints.load.folder_check import check_frozen, check_weights
from lightning_smartinfinity.zero3.optimizer.release import trainings_of
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper, stored_parameter
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together, show_on_rank_zero
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState, ZeroEngine, ZeroParameter

__all__ = [
    "check_names",
    "load_saved_weights",
    "saved_names",
]


Shapes: TypeAlias = Mapping[str, torch.Size | torch.Tensor]
"""Shapes of parameters by name, or tensors that have these shapes."""


def load_saved_weights(engine: ZeroEngine, path: str | Path, *, strict: bool) -> ClientState:
    """Load the weights of an ordinary or universal checkpoint, which any number of processes saved.

    Every rank reads the values of its slices, window by window. If the module is being trained, or its training is over
    but can still be saved, the masters get the values, too. This is a collective: if one rank finds a fault, every rank
    raises. Trained parameters then have their masters' values again; others may hold a part of the checkpoint.

    Args:
        engine: DeepSpeed engine with ZeRO-3, with or without optimizer; moments and step counts stay unchanged.
        path: A folder saved by this strategy, by stock DeepSpeed with ZeRO-3, or converted to a universal checkpoint.
        strict: Whether the names of parameters and buffers must match.

    Returns:
        The state that was saved with the model.

    Raises:
        CheckpointError: The checkpoint belongs to another model or precision, or is damaged.
    """
    saved = _opened(engine, path)
    targets: dict[str, list[ZeroParameter]] = {}
    with raising_together(), reading_checkpoint(saved.path):
        saved.require_whole()
        if strict:
            check_frozen(engine.module, saved.model_states, saved.path)
        targets = _targets(engine.module, saved, strict=strict)
    optimizer = engine.optimizer
    trains = isinstance(optimizer, StorageOptimizer)
    trainings: list[StorageOptimizer] = [optimizer] if trains else _idle_trainings(engine.module)
    for training in trainings:
        # An interrupted fit may have left a step in flight. Rolling it back later would overwrite the loaded weights.
        training.update.drain()
    # No parameter may stay gathered: it would hide values written to the partition.
    if trains:
        optimizer.checkpoint_event_prologue()
    else:
        optimizer.partition_all_parameters()
    with _restored_on_failure(trainings, engine), raising_together(), reading_checkpoint(saved.path):
        engine.load_module_state_dict(checkpoint={"module": _without_parameters(saved)}, strict=strict)
        _fill(targets, saved)
    for training in trainings:
        training._restore_from_bit16_weights()
    if trains:
        optimizer.checkpoint_event_epilogue()
    return user_state(saved.model_states)


def check_names(present: Shapes, saved: Shapes, path: Path) -> None:
    """Compare parameters by names and shapes.

    Raises:
        CheckpointError: A name or shape differs; the message names the first difference.
    """
    difference = next(
        (
            f"{name!r} is {_shape(saved, name)} there and {_shape(present, name)} here"
            for name in sorted(present.keys() | saved.keys())
            if _shape(saved, name) != _shape(present, name)
        ),
        None,
    )
    if difference is not None:
        raise CheckpointError(
            f"The parameters of {path} differ from the model's: {difference}.",
            "Build the model as it was when the checkpoint was saved, with the same parameters frozen.",
        )


def _shape(shapes: Shapes, name: str) -> str:
    if name not in shapes:
        return "missing"
    return f"of shape {tuple(getattr(shapes[name], 'shape', shapes[name]))}"


def _opened(engine: ZeroEngine, path: str | Path) -> SavedWeights:
    if is_universal(path):
        return UniversalFolder(Path(path), rank=dist.get_rank(), world_size=dist.get_world_size())
    return ZeroFolder.of(check_weights(path, engine=engine))


def _saved_shapes(saved: SavedWeights) -> dict[str, torch.Size]:
    """Return the shape of every saved parameter under each of its names."""
    shapes = {**saved.shapes, **(saved.frozen_shapes() or {})}
    return shapes | {alias: shapes[name] for alias, name in saved.shared.items() if name in shapes}


def _targets(module: torch.nn.Module, saved: SavedWeights, *, strict: bool) -> dict[str, list[ZeroParameter]]:
    """Return the parameters that get each saved parameter's values: several, if tied only in the checkpoint."""
    parameters: list[tuple[str, ZeroParameter]] = list(module.named_parameters(remove_duplicate=False))
    shapes, here = _saved_shapes(saved), {name: param.ds_shape for name, param in parameters}
    origins = saved_names(module, shapes, saved.module, saved.path)
    there = {name: shapes[origin] for name, origin in origins.items()}
    if strict:
        unused = shapes.keys() - set(origins.values())
        check_names(here, {**{name: shapes[name] for name in unused}, **there}, saved.path)
    else:
        check_names({name: here[name] for name in there}, there, saved.path)
    # As in load_state_dict, the last name counts if a parameter has several here.
    sources = {param: saved.shared.get(origins[name], origins[name]) for name, param in parameters if name in origins}
    targets: dict[str, list[ZeroParameter]] = {}
    for param, name in sources.items():
        targets.setdefault(name, []).append(param)
    return targets


def _without_parameters(saved: SavedWeights) -> SavedState:
    """Return the state dict to load: buffers, and empty tensors for the parameters, as in the module."""
    nothing = torch.empty(0)
    return {**saved.module, **dict.fromkeys(_saved_shapes(saved).keys() & saved.module.keys(), nothing)}


def _fill(targets: Mapping[str, list[ZeroParameter]], saved: SavedWeights) -> None:
    wanted = {name: _own_elements(params[0]) for name, params in targets.items()}
    stored = [param for params in targets.values() for param in params if stored_parameter(param)]
    swappers: set[ParameterSwapper] = {param.nvme_swapper for param in stored}
    for swapper in swappers:
        swapper.release_prefetched()

    numels = {param: len(wanted[name]) for name, params in targets.items() for param in params}
    nbytes = sum(numel * param.ds_tensor.itemsize for param, numel in numels.items())
    with show_on_rank_zero("Loading the weights", nbytes) as advance:

        def put(name: str, begin: int, values: torch.Tensor) -> None:
            for param in targets[name]:
                _write(param, begin - wanted[name].start, values)
                advance(len(values) * param.ds_tensor.itemsize)

        saved.read_masters(wanted, put)
        saved.read_frozen(wanted, put)
    for swapper in swappers:
        swapper.parts.synchronize()


def _own_elements(param: ZeroParameter) -> range:
    numel, whole = param.partition_numel(), param.ds_numel
    rank = dist.get_rank(param.ds_process_group)
    return range(min(rank * numel, whole), min((rank + 1) * numel, whole))


def _write(param: ZeroParameter, begin: int, values: torch.Tensor) -> None:
    """Replace elements of this rank's slice, rounded to the parameter's dtype."""
    stored = stored_parameter(param)
    if stored is None:
        param.ds_tensor.data[begin : begin + len(values)].copy_(values)
    else:
        rounded = values.to(param.dtype)
        swapper: ParameterSwapper = param.nvme_swapper
        swapper.parts.put(stored, begin * rounded.itemsize, rounded.view(torch.uint8))


def _idle_trainings(module: torch.nn.Module) -> list[StorageOptimizer]:
    """Return this module's trainings that are over but can still be saved on every rank."""
    return [
        training
        for training in trainings_of(module)
        if all(gather(training.rank_state.is_usable, training.dp_process_group))
    ]


@contextmanager
def _restored_on_failure(trainings: Iterable[StorageOptimizer], engine: ZeroEngine) -> Iterator[None]:
    """If loading fails, restore trained parameters from their masters, which the load has not changed yet."""
    try:
        yield
    except SmartInfinityError:
        for optimizer in trainings:
            with raising_together():
                optimizer.update.drained_handler().state.scan(partial(_restore_parameters, optimizer))
            if optimizer is engine.optimizer:
                optimizer.checkpoint_event_epilogue()
        raise


def _restore_parameters(optimizer: StorageOptimizer, window: Window) -> None:
    optimizer.partition.write(window.begin, torch.from_numpy(window.arrays[0]))


def saved_names(module: torch.nn.Module, names: Collection[str], saved: SavedState, path: Path) -> dict[str, str]:
    """Return, for each parameter of a module, the name of the saved parameter with its values.

    If names differ, the module's pre-hooks of ``load_state_dict`` are called with empty tensors instead of values.

    Args:
        module: Module whose parameters are to be loaded.
        names: Names of the saved parameters.
        saved: The saved state dict, which also holds entries that are not parameters.
        path: Path of the checkpoint, for errors.

    Returns:
        The name in the checkpoint by the name in the module, for parameters that are in the checkpoint.

    Raises:
        CheckpointError: A hook computes new values instead of renaming.
    """
    here = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if here <= set(names):
        return {name: name for name in here}
    markers = {name: torch.empty(0) for name in names}
    found: dict[str, object] = {}
    _call_hooks(module, {**saved, **markers}, "", getattr(saved, "_metadata", {}), found)
    by_marker = {id(marker): name for name, marker in markers.items()}
    origins = {name: by_marker.get(id(value), name) for name, value in found.items()}
    computed = sorted(name for name, origin in origins.items() if origin not in markers)
    if computed:
        raise CheckpointError(
            f"A hook of {type(module).__name__} computes {computed[0]!r} of what {path} holds, which is not in memory "
            "while it is loaded.",
            "Make one file of the checkpoint with convert_zero_checkpoint_to_fp32_state_dict, and load that with "
            "load_full_weights=True.",
        )
    return origins


def _call_hooks(
    module: torch.nn.Module, state: dict[str, object], prefix: str, metadata: SavedState, found: dict[str, object]
) -> None:
    """Call the hooks of a module and its children in the order of ``Module.load_state_dict``."""
    for hook in module._load_state_dict_pre_hooks.values():
        hook(state, prefix, metadata.get(prefix[:-1], {}), True, [], [], [])
    for name, param in module._parameters.items():
        if param is not None and prefix + name in state:
            found[prefix + name] = state[prefix + name]
    for name, child in module._modules.items():
        if child is not None:
            start = f"{prefix}{name}."
            below = {key: value for key, value in state.items() if key.startswith(start)}
            _call_hooks(child, below, start, metadata, found)
