"""Finds the checkpoint of transformers to resume from: the last one whose save was completed."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from lightning_smartinfinity.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError
from lightning_smartinfinity.resume.start import SavedStep
from lightning_smartinfinity.storage.folders.replacement import flush, flush_names, flush_tree
from lightning_smartinfinity.storage.io.files import listed, unless_removed
from lightning_smartinfinity.storage.io.os_errors import in_short, storage_errors
from lightning_smartinfinity.zero3.checkpoints.formats.file_checksums import (
    FILE_CHECKSUMS_NAME,
    read_file_checksums,
    write_file_checksums,
)
from lightning_smartinfinity.zero3.checkpoints.formats.trust import require_file
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together

__all__ = [
    "begin_checkpoint",
    "begin_state",
    "checkpoint_to_resume",
    "end_checkpoint",
    "end_state",
    "flush_file",
    "require_undamaged",
    "resume_within_smart_infinity_training",
    "steps_of_checkpoints",
]

_ACCELERATE_FILES = (
    "random_states_*.pkl",
    "scheduler*.bin",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "scaler.pt",
    "custom_checkpoint_*.pkl",
)
_REMEDY = "Move the checkpoint to another folder, or name the checkpoint to resume from."


def checkpoint_to_resume(given: str | bool | None, output_dir: str, *, warn: bool) -> str | bool | None:
    """Return the checkpoint for ``Trainer.train(resume_from_checkpoint=...)``.

    If a process is killed during a save, it leaves an incomplete folder. transformers would choose it, as it takes the
    highest number, and would begin at step 0 if the Trainer's state is missing.

    Args:
        given: The user's argument: a folder, True for the last checkpoint in ``output_dir``, or None.
        output_dir: The Trainer's folder of checkpoints.
        warn: Whether this rank warns of skipped checkpoints.

    Raises:
        CheckpointNotFoundError: The folder does not exist.
        CheckpointError: The folder cannot be resumed from; or ``given`` is True, and no checkpoint can, or the newest
            is damaged.
    """
    if not given:
        return given
    if given is not True:
        _require_resumable(Path(given))
        return given
    found, fault = _newest_resumable(output_dir, warn=warn)
    if fault is not None:
        raise fault
    return given if found is None else str(found)


def steps_of_checkpoints(output_dir: str, *, warn: bool) -> tuple[dict[str, SavedStep], CheckpointError | None]:
    """Return the step of the newest checkpoint that a training can resume from, by its path. Collective.

    Args:
        output_dir: The Trainer's folder of checkpoints.
        warn: Whether this rank warns of skipped checkpoints.

    Returns:
        The step by path as this rank sees it, and the reason if a rank sees checkpoints, and can resume from none.

    Raises:
        CheckpointError: The newest is damaged; raised on every rank.
    """
    found: Path | None = None
    fault: CheckpointError | None = None
    with raising_together():
        found, fault = _newest_resumable(output_dir, warn=warn)
    fault = next((each for each in gather(fault, None) if each is not None), None)
    return ({} if found is None else {str(found): SavedStep(_number_of(found) or 0)}), fault


def begin_checkpoint(folder: str, *, resumable: bool) -> None:
    """Prepare a checkpoint folder before its files are written.

    If the folder exists, the checksums in it and the Trainer's state are removed, in this order. These are written
    last: the Trainer's state marks a checkpoint as complete, and its checksums mark it as complete and flushed. A
    placeholder is written as the optimizer file that a Trainer in memory would load. Loading it raises an error that
    names :func:`resume_within_smart_infinity_training`, so that such a Trainer does not resume with a new optimizer.

    Args:
        folder: The checkpoint's folder.
        resumable: Whether the optimizer's state is saved in it.

    Raises:
        StorageError: The folder cannot be written.
    """
    if _number_of(Path(folder)) is None:
        return
    with storage_errors("Beginning the checkpoint", folder):
        for name in (FILE_CHECKSUMS_NAME, _trainer_state()):
            Path(folder, name).unlink(missing_ok=True)
        if resumable:
            saved = io.BytesIO()
            torch.save(_InMemory(folder), saved)
            unless_removed(partial(_write_placeholder, Path(folder), saved.getvalue()))


def _write_placeholder(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _optimizer_file()).write_bytes(content)


def flush_file(file: str) -> None:
    """Flush a checkpoint's file that only this rank wrote. Other ranks flush theirs in the same call.

    This is a collective, so that no rank removes older checkpoints before all files are flushed.

    Args:
        file: Path of the file.

    Raises:
        StorageError: The file could not be flushed; raised on every rank.
    """
    with raising_together(), storage_errors("Flushing", file):
        flush(Path(file))
        flush_names(Path(file))


def end_checkpoint(folder: Path) -> None:
    """Flush a checkpoint after its files are written, and write checksums of those of transformers.

    The engine flushed its own files, which have checksums; transformers does neither.

    Args:
        folder: The checkpoint, or a folder of checkpoints, which is only flushed.

    Raises:
        StorageError: A file could not be flushed, or the checksums could not be written.
    """
    with storage_errors("Flushing the checkpoint", folder):
        flush_tree(folder)
        if _number_of(folder) is None:
            flush_names(folder)
        else:
            _write_checksums(folder, _trainer_files())


def begin_state(folder: str) -> None:
    """Remove the checksums of an earlier state in a folder, before Accelerate writes its files there.

    Raises:
        StorageError: They cannot be removed.
    """
    with storage_errors("Beginning the save", folder):
        Path(folder, FILE_CHECKSUMS_NAME).unlink(missing_ok=True)


def end_state(folder: str, rank: int, writes: bool) -> None:
    """Flush a state that Accelerate has saved, and write the checksums of Accelerate's files. Collective.

    Args:
        folder: The state's folder.
        rank: This rank.
        writes: Whether this rank writes the checksums.

    Raises:
        StorageError: A file could not be flushed, or the checksums could not be written; raised on every rank.
    """
    flush_file(os.path.join(folder, f"random_states_{rank}.pkl"))
    with raising_together(), storage_errors("Flushing the state", folder):
        if writes:
            flush_tree(Path(folder))
            _write_checksums(Path(folder), _ACCELERATE_FILES)


def require_undamaged(folder: str) -> None:
    """Compare the files that Accelerate reads with their checksums. Collective.

    Raises:
        CheckpointError: A file is damaged; raised on every rank.
    """
    with raising_together():
        _require_undamaged(Path(folder))


def resume_within_smart_infinity_training(folder: str) -> NoReturn:
    """Raise the error for a Trainer in memory that resumes from a checkpoint of SmartInfinityTraining.

    Args:
        folder: The checkpoint.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"The optimizer's state of {folder} is in its folder global_step*, which only SmartInfinityTraining reads.",
        "Resume within it, with TrainingArguments(deepspeed=training.config). To train in memory instead, with an "
        "optimizer that begins anew, load the model by from_pretrained and train without resume_from_checkpoint.",
    )


class _InMemory:
    """An object whose unpickling calls :func:`resume_within_smart_infinity_training`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], NoReturn], tuple[str]]:
        return resume_within_smart_infinity_training, (self._folder,)


def _require_resumable(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            f"resume_from_checkpoint={str(folder)!r}: there is no such folder.",
            "Pass a folder checkpoint-N, or True for the last one in output_dir.",
        )
    fault = _fault_in(folder)
    if fault is not None:
        raise CheckpointError(
            f"resume_from_checkpoint={str(folder)!r}: {fault}.",
            "Pass an earlier checkpoint, or True for the last one that can be resumed.",
        )


def _newest_resumable(output_dir: str, *, warn: bool) -> tuple[Path | None, CheckpointError | None]:
    """Return the newest checkpoint that can be resumed from; or the reason if there are some, and none can."""
    faults: dict[str, str] = {}
    for folder in _newest_first(Path(output_dir)):
        fault = _fault_in(folder)
        if fault is None:
            if faults and warn:
                warnings.warn(f"Resuming from {str(folder)!r}: {_told(faults)}.", stacklevel=2)
            return folder, None
        faults[folder.name] = fault
    problem = f"No checkpoint in {output_dir!r} can be resumed: {_told(faults)}."
    return None, CheckpointError(problem, "Train without resume_from_checkpoint.") if faults else None


def _newest_first(output_dir: Path) -> list[Path]:
    numbers = {path: _number_of(path) for path in (output_dir.iterdir() if output_dir.is_dir() else ())}
    found = {path: number for path, number in numbers.items() if number is not None and path.is_dir()}
    return sorted(found, key=found.__getitem__, reverse=True)


def _number_of(folder: Path) -> int | None:
    """Return N for a folder named ``checkpoint-N``, and None for other folders."""
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    number = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdecimal() and number != folder.name else None


def _fault_in(folder: Path) -> str | None:
    """Return why a training cannot resume from a folder, or None if it can.

    Raises:
        CheckpointError: The Trainer's state is complete, but damaged; or a file differs from its checksum.
    """
    _require_undamaged(folder)
    file = folder / _trainer_state()
    require_file(file)
    text = file.read_bytes().strip() if file.exists() else b""
    if not text.endswith(b"}"):
        return f"its save was not completed ({_trainer_state()} is missing or cut off)"
    try:
        json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{file} is damaged ({in_short(error)}), and its checkpoint may be the newest.",
            _REMEDY,
        ) from error
    if not any(path.is_dir() for path in folder.glob("global_step*")):
        return "it holds a model without optimizer state (save_only_model=True?)"
    return None


def _require_undamaged(folder: Path) -> None:
    """Compare the files of transformers or Accelerate with their checksums. Those of earlier versions have none."""
    checksums = read_file_checksums(folder)
    damage = None if checksums is None else next(checksums.damage(), None)
    if damage is not None:
        raise CheckpointError(
            damage,
            f"{_REMEDY} If the change was intended, delete {folder / FILE_CHECKSUMS_NAME}: then nothing is compared.",
        )


def _told(faults: dict[str, str]) -> str:
    return "; ".join(f"{name} is passed over, since {fault}" for name, fault in faults.items())


def _write_checksums(folder: Path, names: Iterable[str]) -> None:
    write_file_checksums(folder, [file.name for name in names for file in listed(folder, name)])
    flush_names(folder / FILE_CHECKSUMS_NAME)


def _trainer_files() -> list[str]:
    """Return the names of the files that transformers' Trainer writes for a resume, as patterns."""
    from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

    return [_trainer_state(), TRAINING_ARGS_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME, "rng_state*.pth"]


def _trainer_state() -> str:
    from transformers.trainer import TRAINER_STATE_NAME

    return str(TRAINER_STATE_NAME)


def _optimizer_file() -> str:
    from transformers.trainer import OPTIMIZER_NAME

    return str(OPTIMIZER_NAME)
