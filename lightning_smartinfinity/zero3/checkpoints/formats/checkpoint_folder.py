"""Finds the folder with the processes' files in a checkpoint, and the files in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_smartinfinity.errors import CheckpointError, CheckpointNotFoundError, SmartInfinityError
from lightning_smartinfinity.settings import LOCAL_FOLDER
from lightning_smartinfinity.settings.rules import shown
from lightning_smartinfinity.settings.strategy import STORAGE, STORAGE_OR_NEW
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.settings.wrong_names import did_you_mean
from lightning_smartinfinity.storage.io.files import listed
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import LATEST, restore_interrupted
from lightning_smartinfinity.zero3.checkpoints.formats.format_version import require_readable
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import DAMAGE
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import PERMISSION_REMEDY

__all__ = [
    "OPTIMIZER_FILES",
    "has_latest",
    "has_universal",
    "model_files",
    "optimizer_files",
    "reading_checkpoint",
    "require_latest",
    "saved_by",
    "tagged_folder",
]

OPTIMIZER_FILES = "*zero_pp_rank_*_mp_rank_*_optim_states.pt"
"""Name pattern of the files with optimizer states."""

_MODEL_FILES = "zero_pp_rank_*_mp_rank_*_model_states.pt"
_NAMED = 3
_MAX_TAG_BYTES = 255  # limit of names in file systems
_RANK = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_")


def saved_by(file: Path) -> int:
    """Return the rank of the process that saved a file; -1 if the file's name has none."""
    match = _RANK.search(file.name)
    return int(match.group(1)) if match else -1


def has_latest(folder: Path) -> bool:
    """Return whether there is a file ``latest`` next to the folder with the processes' files."""
    return (folder.parent / LATEST).is_file()


def require_latest(folder: Path) -> None:
    """Check that there is a file ``latest``, which is written last, next to the folder with the processes' files.

    Raises:
        CheckpointError: The file is missing.
    """
    if not has_latest(folder):
        raise CheckpointError(
            f"{folder.parent} has no file 'latest': the checkpoint is not whole.", "Copy checkpoints as whole folders."
        )


def optimizer_files(folder: Path) -> list[Path]:
    """Return the optimizer state files of all processes, in no meaningful order."""
    return listed(folder, OPTIMIZER_FILES)


def model_files(folder: Path) -> list[Path]:
    """Return the model state files of all processes, in no meaningful order."""
    return listed(folder, _MODEL_FILES)


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
        if isinstance(error, PermissionError):
            raise CheckpointError(f"The checkpoint {path} cannot be read: {error}.", PERMISSION_REMEDY) from error
        raise CheckpointError(
            f"The checkpoint {path} could not be loaded: {type(error).__name__}: {error}.",
            "Use an undamaged checkpoint of the same model and configuration.",
        ) from error


def _not_found(path: str | Path) -> CheckpointNotFoundError:
    if str(path) in (STORAGE, STORAGE_OR_NEW):
        return CheckpointNotFoundError(
            f"No training waits here to be resumed from storage, and no checkpoint has the path {str(path)!r}.",
            f"To resume from storage, {user_calls().resumes}; for a checkpoint, check the path.",
        )
    remedy = "Check the path." if LOCAL_FOLDER.holds(path) else "Copy it to a local folder: URLs are not read."
    if len(Path(path).parts) == 1:
        remedy = f"{did_you_mean(str(path), (STORAGE, STORAGE_OR_NEW))}{remedy}"
    return CheckpointNotFoundError(f"The checkpoint {path} does not exist.", remedy)


def has_universal(path: Path) -> bool:
    """Return whether a folder is a universal checkpoint.

    Raises:
        CheckpointError: It is one, and another version of this package wrote it in a format that is not read.
    """
    folder = path / "zero"
    if not folder.is_dir():
        return False
    require_readable(folder / "optimizer_state.pt")
    return True


def tagged_folder(path: Path, tag: str | None = None) -> Path:
    """Return the folder that holds the processes' files: a subfolder of ``path``, or ``path`` itself.

    Args:
        path: The folder that was saved, or the folder in it that holds the files.
        tag: Name of the subfolder; None: the one that ``latest`` names.

    Raises:
        CheckpointNotFoundError: ``path`` does not exist.
        CheckpointError: The subfolder does not exist, ``path`` is a file, or another version of this package wrote the
            files in a format that is not read.
    """
    folder = _tagged_folder(path, tag)
    for file in sorted(optimizer_files(folder))[:1]:
        require_readable(file)
    return folder


def _tagged_folder(path: Path, tag: str | None) -> Path:
    if not path.exists():
        raise _not_found(path)
    if not path.is_dir():
        raise CheckpointError(
            f"The checkpoint {path} is a file; the smart_infinity strategy saves folders.",
            "Load a plain checkpoint's weights with LightningModule.load_from_checkpoint before fit.",
        )
    if optimizer_files(path):  # path is the subfolder itself: its parent may hold several saves
        return path
    if tag is None:
        latest = path / LATEST
        tag = _tag_in(latest) if latest.is_file() else "checkpoint"
    restore_interrupted(path, tag)
    if not (path / tag).is_dir():
        raise CheckpointError(
            f"{path} has no folder {tag!r}: it is not a ZeRO-3 checkpoint.",
            _where_else(path),
        )
    return path / tag


def _tag_in(latest: Path) -> str:
    """Return the name of the subfolder that ``latest`` names; it must be directly in the checkpoint."""
    with latest.open("rb") as file:
        content = file.read(_MAX_TAG_BYTES + 1)
    tag = content.decode(errors="replace").strip()
    if len(content) > _MAX_TAG_BYTES or tag in ("", ".", "..") or set(tag) & {"/", "\0"}:
        raise CheckpointError(
            f"{latest} names {shown(tag)}, which is not the name of a folder next to it.",
            "Write the name of the subfolder with the processes' files into it, or use another checkpoint.",
        )
    return tag


def _where_else(path: Path) -> str:
    """Return a remedy that names the checkpoints below a folder such as lightning_logs, if there are any."""
    found = [folder for levels in range(4) for folder in sorted(path.glob("*/" * levels + "*.ckpt")) if folder.is_dir()]
    if not found:
        return "Check the path, or pass the folder in it that holds the files of the processes."
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"Pass a checkpoint in it: {', '.join(map(str, found[:_NAMED]))}{more}."
