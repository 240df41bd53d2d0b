"""Checks on all ranks whether a checkpoint folder can be loaded, before any of them begins to load it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_SHAPES, PARAM_SHAPES

from lightning_smartinfinity.checkpoint_hint import LIGHTNING_KEY
from lightning_smartinfinity.checks import shown
from lightning_smartinfinity.errors import CheckpointError, CheckpointNotFoundError, SmartInfinityError
from lightning_smartinfinity.store.in_time import unless_idle
from lightning_smartinfinity.zero3.checkpoints.folder_swap import restore_interrupted
from lightning_smartinfinity.zero3.checkpoints.saved_weights import DAMAGE, RANK_KEY, SAVE_ID, require_rank
from lightning_smartinfinity.zero3.checkpoints.tensor_file import check_records
from lightning_smartinfinity.zero3.checkpoints.trust import check_plain, load_file
from lightning_smartinfinity.zero3.collectives import gather, raising_together
from lightning_smartinfinity.zero3.untyped import SavedState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine import PortableEngine, SmartInfinityEngine

__all__ = [
    "check_checkpoint",
    "check_frozen",
    "check_needed",
    "check_same_save",
    "check_weights",
    "folder_to_resume",
    "optimizer_files",
    "reading_checkpoint",
    "require_latest",
    "tagged_folder",
]

_NAMED = 3
_MAX_TAG_BYTES = 255  # of a name in a file system
_OPTIMIZER_FILES = "*zero_pp_rank_*_mp_rank_*_optim_states.pt"


def folder_to_resume(path: str | Path, *, engine: PortableEngine) -> tuple[Path, bool]:
    """Find the folder with the processes' files in a checkpoint from which an engine is to resume.

    This is a collective: if one rank finds a fault, every rank raises.

    Args:
        path: The folder that Lightning or DeepSpeed saved, or the folder in it that holds the files.
        engine: DeepSpeed engine that trains and will load the checkpoint.

    Returns:
        The folder with the files, whose name is DeepSpeed's tag, and whether as many processes saved it as there are.

    Raises:
        CheckpointError: There is none, it is not whole, or it was saved in another precision.
    """
    folder, num_saved = Path(path), 0

    def look() -> tuple[Path, int]:
        found = _checked_folder(path, engine)
        require_latest(found)
        return found, len(optimizer_files(found))

    with raising_together(), reading_checkpoint(path):
        folder, num_saved = unless_idle(look, doing="Looking at", path=folder)
    return folder, all(gather(num_saved == dist.get_world_size(), None))


def check_checkpoint(
    folder: Path, *, engine: PortableEngine, strict: bool = True, needed: Collection[str] = ()
) -> None:
    """Check that an engine can resume from what as many processes saved, each from its own files.

    This is a collective: if one rank finds a fault, every rank raises.

    Args:
        folder: The folder with the files.
        engine: DeepSpeed engine that trains and will load the checkpoint.
        strict: Whether names of parameters and buffers have to match.
        needed: Keys that must have been saved beside the model.

    Raises:
        CheckpointError: There is a fault; the message names the folder or file.
    """
    with raising_together(), reading_checkpoint(folder):
        _check_own_share(folder)
        states = _own_model_states(folder, engine)
        _check_same_world_size(states, folder)
        check_needed(states, needed, folder)
        _check_parameters(states, engine)
        if strict:
            check_frozen(engine.module, states, folder)


def check_weights(path: str | Path, *, engine: PortableEngine) -> Path:
    """Check that a folder is an undamaged ZeRO-3 checkpoint of this precision.

    This is for weights alone, which any number of processes may have saved.

    Returns:
        The folder with the files.
    """
    folder = Path(path)
    with raising_together(), reading_checkpoint(path):
        folder = unless_idle(partial(_checked_folder, path, engine), doing="Looking at", path=folder)
        _check_own_share(folder)
    return folder


def require_latest(folder: Path) -> None:
    """Check that there is a file ``latest`` beside the folder with the processes' files: it is written last.

    Raises:
        CheckpointError: There is none.
    """
    if not (folder.parent / "latest").is_file():
        raise CheckpointError(
            f"{folder.parent} has no file 'latest': the checkpoint is not whole.", "Copy checkpoints as whole folders."
        )


def check_needed(states: SavedState, needed: Collection[str], path: str | Path) -> None:
    """Check that the entries that a Trainer needs to resume were saved beside the model.

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
    """Say how the weights of a checkpoint become a file that is loaded before a fit."""
    if LIGHTNING_KEY in states:
        output, reader = ["weights.ckpt", "--to", "lightning"], "load_from_checkpoint takes"
    else:
        output, reader = ["weights", "--to", "safetensors", "--dtype", "fp32"], "load_file of safetensors reads"
    command = shlex.join(["smart-infinity", "export", str(path), *output])
    return f"`{command}` writes a file that {reader}"


def check_frozen(module: torch.nn.Module, states: SavedState, path: str | Path) -> None:
    """Check that the parameters that are not trained were saved, if the model has any.

    Raises:
        CheckpointError: They were left out.
    """
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    if frozen and states.get(FROZEN_PARAM_SHAPES) is None:
        raise CheckpointError(
            f"{path} was saved without its frozen parameters (exclude_frozen_parameters=True), {frozen[0]!r} for one.",
            "Build the model with their values and load with strict_loading=False in the module, or strict=False in "
            "Fabric.load: they keep what they have.",
        )


def optimizer_files(folder: Path) -> list[Path]:
    """Return the files of optimizer states of all processes; their order has no meaning."""
    return unless_idle(lambda: sorted(folder.glob(_OPTIMIZER_FILES)), doing="Reading", path=folder)


def check_same_save(engine: SmartInfinityEngine, client_state: SavedState) -> None:
    """Check after loading that one and the same save wrote every file that any rank read.

    A folder can hold files of two saves if they were copied by hand.

    Raises:
        CheckpointError: The files come from different saves; raised on every rank.
    """
    saves = {str(save) for save in (client_state.get(SAVE_ID), engine.optimizer.save_id)}
    if len({save for rank_saves in gather(saves, None) for save in rank_saves}) > 1:
        raise CheckpointError(
            "The checkpoint's files come from different saves.",
            "Copy checkpoints as whole folders, or use another one.",
        )


@contextmanager
def reading_checkpoint(path: str | Path) -> Iterator[None]:
    """Turn errors that torch or DeepSpeed raise on a missing or damaged checkpoint into a :class:`CheckpointError`."""
    try:
        yield
    except SmartInfinityError:
        raise
    except DAMAGE as error:
        if isinstance(error, FileNotFoundError) and not os.path.exists(path):
            raise _not_found(path) from error
        raise CheckpointError(
            f"The checkpoint {path} could not be loaded: {type(error).__name__}: {error}.",
            "Use an undamaged checkpoint of the same model and configuration.",
        ) from error


def _not_found(path: str | Path) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"The checkpoint {path} does not exist.", "Check the path.")


def tagged_folder(path: Path) -> Path:
    """Return the folder that holds the processes' files: a subfolder of ``path``, or ``path`` itself.

    Raises:
        CheckpointNotFoundError: There is nothing at ``path``.
        CheckpointError: There is no such folder.
    """
    if not path.exists():
        raise _not_found(path)
    if not path.is_dir():
        raise CheckpointError(
            f"The checkpoint {path} is a file; the smart_infinity strategy saves folders.",
            "Load a plain checkpoint's weights with LightningModule.load_from_checkpoint before fit.",
        )
    if optimizer_files(path):  # one of several saves that lie in the same folder
        return path
    latest = path / "latest"
    tag = _tag_in(latest) if latest.is_file() else "checkpoint"
    restore_interrupted(path, tag)
    if not (path / tag).is_dir():
        raise CheckpointError(
            f"{path} has no folder {tag!r}: it is not a ZeRO-3 checkpoint.",
            _where_else(path),
        )
    return path / tag


def _tag_in(latest: Path) -> str:
    """Return the name of the subfolder that ``latest`` names, which lies directly in the checkpoint."""
    with latest.open("rb") as file:
        content = file.read(_MAX_TAG_BYTES + 1)
    tag = content.decode(errors="replace").strip()
    if len(content) > _MAX_TAG_BYTES or tag in ("", ".", "..") or set(tag) & {"/", "\0"}:
        raise CheckpointError(
            f"{latest} names {shown(tag)}, which is not the name of a folder beside it.",
            "Write the name of the subfolder with the processes' files into it, or use another checkpoint.",
        )
    return tag


def _where_else(path: Path) -> str:
    """Say where checkpoints are if a folder that holds some was passed, such as lightning_logs."""
    found = [folder for levels in range(4) for folder in sorted(path.glob("*/" * levels + "*.ckpt")) if folder.is_dir()]
    if not found:
        return "Check the path, or pass the folder in it that holds the files of the processes."
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"Pass a checkpoint in it: {', '.join(map(str, found[:_NAMED]))}{more}."


def _checked_folder(path: str | Path, engine: PortableEngine) -> Path:
    folder = tagged_folder(Path(path))
    files = optimizer_files(folder)
    if not files:
        raise CheckpointError(f"{folder} holds no ZeRO-3 optimizer states.", "Pass a ZeRO-3 checkpoint.")
    _check_precision(files, engine)
    return folder


def _check_precision(files: list[Path], engine: PortableEngine) -> None:
    saved, wanted = files[0].name.startswith("bf16_"), bool(engine.bfloat16_enabled())
    if saved != wanted:
        raise CheckpointError(
            f"{files[0].parent} was saved {'in' if saved else 'without'} bf16, this run is "
            f"{'in' if wanted else 'without'} it.",
            "Use the precision that it was saved with.",
        )


def _check_same_world_size(states: SavedState, folder: Path) -> None:
    num_saved, num_files = states["dp_world_size"], dist.get_world_size()
    if num_saved != num_files:
        raise CheckpointError(
            f"{folder} holds files of {num_files} processes, and says that {num_saved} saved it.",
            "Use another checkpoint.",
        )


def _check_own_share(folder: Path) -> None:
    # One rank verifies each file, but not the tensors of optimizer states, which are verified when they are read.
    files = unless_idle(lambda: sorted(folder.glob("*.pt")), doing="Looking at", path=folder)
    for file in files[dist.get_rank() :: dist.get_world_size()]:
        check_records(file, tensors=not file.match(_OPTIMIZER_FILES))
        check_plain(file)


def _own_model_states(folder: Path, engine: PortableEngine) -> SavedState:
    path = engine._get_ckpt_name(str(folder.parent), folder.name)
    with reading_checkpoint(path):
        states: SavedState = load_file(path, map_location="cpu", mmap=True)
    require_rank(states.get(RANK_KEY), dist.get_rank(), Path(path))
    return states


def _check_parameters(states: SavedState, engine: PortableEngine) -> None:
    """Compare names and shapes in the order in which the optimizer's state holds the parameters."""
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
