"""Checks on all ranks whether a checkpoint folder can be loaded, before any of them begins to load it."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_SHAPES, PARAM_SHAPES

from lightning_smartinfinity.checkpoint_hint import LIGHTNING_KEY
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.io.files import listed
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import (
    OPTIMIZER_FILES,
    reading_checkpoint,
    saved_by,
)
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import FoundCheckpoint, find_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.saved_training import MASTERS, SavedTraining
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import RANK_KEY, SAVE_ID, require_rank
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import check_records
from lightning_smartinfinity.zero3.checkpoints.formats.trust import check_plain, load_file
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder, is_universal
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.untyped import SavedState, ZeroEngine

__all__ = [
    "check_checkpoint",
    "check_files",
    "check_frozen",
    "check_needed",
    "check_same_save",
    "check_weights",
]


def check_checkpoint(
    found: FoundCheckpoint, *, engine: ZeroEngine, strict: bool = True, needed: Collection[str] = ()
) -> None:
    """Check that an engine can resume from a checkpoint of the same number of processes, each from its own files.

    This is a collective: if one rank finds a fault, every rank raises.

    Args:
        found: The folder with the files.
        engine: DeepSpeed engine that trains and will load the checkpoint.
        strict: Whether the names of parameters and buffers must match.
        needed: Keys that must have been saved with the model.

    Raises:
        CheckpointError: There is a fault; the message names the folder or file.
    """
    folder = found.folder
    with raising_together(), reading_checkpoint(folder):
        _check_own_share(folder, in_parts=found.in_parts)
        states = _own_model_states(folder, engine)
        _check_same_world_size(states, folder)
        check_needed(states, needed, folder)
        _check_parameters(states, engine)
        if strict:
            check_frozen(engine.module, states, folder)


def check_files(path: str | Path) -> None:
    """Check that all files that a load of a checkpoint needs are there and can be opened. Collective.

    Everything is verified but the arrays of trained parameters, whatever the number of processes that saved it. No
    engine is needed.

    Raises:
        CheckpointError: There is no checkpoint, or it is incomplete or damaged; raised on every rank.
    """
    saved: SavedTraining
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if is_universal(path):
        saved = universal = UniversalFolder(Path(path), rank=rank, world_size=world_size)
        with raising_together(), reading_checkpoint(path):
            universal.require_arrays((MASTERS, *universal.arrays))
    else:
        found = find_checkpoint(path, bf16=None)
        if found.in_parts:
            with raising_together(), reading_checkpoint(path):
                _check_own_share(found.folder, in_parts=True)
            return
        saved = ZeroFolder.of(found)
    with raising_together(), reading_checkpoint(path), closing(saved):
        saved.check_states()


def check_weights(path: str | Path, *, engine: ZeroEngine) -> FoundCheckpoint:
    """Check that a folder is an undamaged ZeRO-3 checkpoint of this precision, to load its weights only.

    Any number of processes may have saved it.
    """
    found = find_checkpoint(path, bf16=engine.bfloat16_enabled())
    with raising_together(), reading_checkpoint(path):
        _check_own_share(found.folder, in_parts=found.in_parts)
    return found


def check_needed(states: SavedState, needed: Collection[str], path: str | Path) -> None:
    """Check that the entries that a Trainer needs to resume were saved with the model.

    Raises:
        CheckpointError: Some are missing: DeepSpeed itself saved the checkpoint, or Lightning saved weights only.
    """
    missing = sorted(set(needed) - states.keys())
    if missing:
        raise CheckpointError(
            f"{path} lacks {', '.join(map(repr, missing))}: it was saved by DeepSpeed itself or as weights only, and a "
            "Trainer cannot go on from it.",
            f"Evaluate it, go on from it in Fabric, or start from its weights: {_export_of(path, states)}.",
        )


def _export_of(path: str | Path, states: SavedState) -> str:
    """Return advice on how to export a checkpoint's weights to a file that can be loaded before a fit."""
    if LIGHTNING_KEY in states:
        output, reader = ["weights.ckpt", "--to", "lightning"], "load_from_checkpoint takes"
    else:
        output, reader = ["weights", "--to", "safetensors", "--dtype", "fp32"], "load_file of safetensors reads"
    command = shlex.join(["smart-infinity", "export", str(path), *output])
    return f"`{command}` writes a file that {reader}"


def check_frozen(module: torch.nn.Module, states: SavedState, path: str | Path) -> None:
    """Check that untrained parameters were saved, if the model has any.

    Raises:
        CheckpointError: The checkpoint was saved without them.
    """
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    if frozen and states.get(FROZEN_PARAM_SHAPES) is None:
        raise CheckpointError(
            f"{path} was saved without its frozen parameters (exclude_frozen_parameters=True), {frozen[0]!r} for one.",
            "Build the model with their values and load with strict_loading=False in the module, or strict=False in "
            "Fabric.load: they keep what they have.",
        )


def check_same_save(save_id: str | None, client_state: SavedState) -> None:
    """Check after loading that all files that any rank read come from the same save.

    A folder can hold files of two saves if they were copied by hand.

    Raises:
        CheckpointError: The files come from different saves; raised on every rank.
    """
    saves = {str(save) for save in (client_state.get(SAVE_ID), save_id)}
    if len({save for rank_saves in gather(saves, None) for save in rank_saves}) > 1:
        raise CheckpointError(
            "The checkpoint's files come from different saves.",
            "Copy checkpoints as whole folders, or use another one.",
        )


def _check_same_world_size(states: SavedState, folder: Path) -> None:
    num_saved, num_files = states["dp_world_size"], dist.get_world_size()
    if num_saved != num_files:
        raise CheckpointError(
            f"{folder} holds files of {num_files} processes, and says that {num_saved} saved it.",
            "Use another checkpoint.",
        )


def _check_own_share(folder: Path, *, in_parts: bool) -> None:
    # One rank verifies each file, except the tensors of optimizer states, which are verified when read.
    files = listed(folder, "*.pt")
    rank = dist.get_rank()
    share = [each for each in files if saved_by(each) == rank] if in_parts else files[rank :: dist.get_world_size()]
    for file in share:
        check_records(file, tensors=not file.match(OPTIMIZER_FILES))
        check_plain(file)


def _own_model_states(folder: Path, engine: ZeroEngine) -> SavedState:
    path = engine._get_ckpt_name(str(folder.parent), folder.name)
    with reading_checkpoint(path):
        states: SavedState = load_file(path, map_location="cpu", mmap=True)
    require_rank(states.get(RANK_KEY), dist.get_rank(), Path(path))
    return states


def _check_parameters(states: SavedState, engine: ZeroEngine) -> None:
    """Compare the parameters' names and shapes, in the order of the optimizer's state."""
    saved, expected = (
        [(name, tuple(shape)) for group in groups for name, shape in group.items()]
        for groups in (states[PARAM_SHAPES], engine._get_zero_param_shapes())
    )
    for number, (there, here) in enumerate(zip_longest(saved, expected)):
        if there != here:
            raise CheckpointError(
                f"The checkpoint's parameters differ from the model's: parameter {number} is {_described(there)} there "
                f"and {_described(here)} here.",
                "Build the model and its parameter groups as they were when it was saved.",
            )


def _described(parameter: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if parameter is None else f"{parameter[0]!r} of shape {parameter[1]}"
