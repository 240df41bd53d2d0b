"""Reads every file of a checkpoint, and compares it with its checksums and with the other files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from lightning_smartinfinity.common.progress import Show
from lightning_smartinfinity.errors import CheckpointError, StorageError, UnsupportedError
from lightning_smartinfinity.storage.io.deadlines import doing_now
from lightning_smartinfinity.storage.io.files import bounded
from lightning_smartinfinity.storage.io.os_errors import storage_error
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import CHECKSUMS_NAME
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import (
    has_universal,
    optimizer_files,
    reading_checkpoint,
    require_latest,
    tagged_folder,
)
from lightning_smartinfinity.zero3.checkpoints.formats.file_checksums import FILE_CHECKSUMS_NAME, read_file_checksums
from lightning_smartinfinity.zero3.checkpoints.formats.saved_training import MASTERS
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import DAMAGE, windows
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import (
    PERMISSION_REMEDY,
    TensorFile,
    check_records,
    refused,
)
from lightning_smartinfinity.zero3.checkpoints.formats.trust import check_plain, loading_policy
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder
from lightning_smartinfinity.zero3.checkpoints.formats.whole_file import has_checksums
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder

__all__ = ["ScrubbedCheckpoint", "scrub_checkpoint"]

_NAMED = 8  # missing ranks
_OF_OTHERS = ("trainer_state.json", "random_states_*.pkl")  # files of transformers' Trainer and of Accelerate
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_(model|optim)_states\.pt")


@dataclass(frozen=True, kw_only=True)
class ScrubbedCheckpoint:
    """The result of reading a checkpoint: the files, and sentences about damage.

    Args:
        files: Files that were read.
        damaged: One sentence about each thing that is damaged, missing or from another save.
        unknown: Sentences about files that were not read or not loaded, so that their state is unknown.
    """

    files: list[Path] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def scrub_checkpoint(path: Path, *, weights_only: bool = True, show: Show) -> ScrubbedCheckpoint:
    """Read all files of ``torch.save`` in a checkpoint, universal or not, and check that a training could resume.

    Or read one such file with whole weights, as ``export --to lightning`` writes it.

    Nothing there changes, except that a save interrupted during its swap is restored, as a load would do it.

    Args:
        path: The folder that was saved, or the file.
        weights_only: Whether to load only tensors, numbers, text and containers of these.
        show: Function that shows the progress.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    found = ScrubbedCheckpoint()
    try:
        _scrub(path, found, weights_only, show)
    except OSError as error:
        found.unknown.append(str(_unreadable(error, path)))
    except StorageError as error:  # still report what was found before
        found.unknown.append(str(error))
    return found


@bounded("Reading")
def _scrub(path: Path, found: ScrubbedCheckpoint, weights_only: bool, show: Show) -> None:
    with loading_policy(weights_only, consent="--no-weights-only"):
        if path.is_file():
            _scrub_file(path, found, show)
        else:
            _scrub_folder(path, found, show)


def _scrub_file(path: Path, found: ScrubbedCheckpoint, show: Show) -> None:
    if has_checksums(path):
        _read_files([path], found, path, show)
    else:
        found.unknown.append(f"{path} has no checksums, so nothing was compared.")


def _scrub_folder(path: Path, found: ScrubbedCheckpoint, show: Show) -> None:
    universal = has_universal(path)
    folder = path if universal else tagged_folder(path)
    _require_listable(folder)
    files = sorted(folder.rglob("*.pt"))
    if not files or not (universal or optimizer_files(folder)):
        raise CheckpointError(f"{path} holds no checkpoint of ZeRO-3.", "Pass the folder that was saved.")
    damaged = _read_files(files, found, path, show)
    if not found.unknown:
        for sentence in (_of_universal if universal else _of_ordinary)(folder, files, damaged):
            found.damaged.append(sentence)
    _scrub_other_files(path, found)


def _scrub_other_files(path: Path, found: ScrubbedCheckpoint) -> None:
    """Compare the files that transformers' Trainer or Accelerate has stored next to ours."""
    try:
        checksums = read_file_checksums(path)
        if checksums is not None:
            found.files.extend(path / name for name in checksums.files)
            found.damaged.extend(checksums.damage())
        elif any(any(path.glob(pattern)) for pattern in _OF_OTHERS):
            found.unknown.append(
                f"{path} has no {FILE_CHECKSUMS_NAME}, so the files of transformers or Accelerate were not compared."
            )
    except CheckpointError as error:  # the file of the checksums is damaged
        found.damaged.append(error.problem)
    except UnsupportedError as error:
        found.unknown.append(str(error))


def _read_files(files: Sequence[Path], found: ScrubbedCheckpoint, path: Path, show: Show) -> set[Path]:
    """Read files of ``torch.save``, and return those that are damaged."""
    damaged: set[Path] = set()
    with show(f"Reading {path}", sum(file.stat().st_size for file in files)) as advance:
        for file in files:
            with doing_now("Reading", file):
                _read_through(file, found, damaged)
            found.files.append(file)
            advance(file.stat().st_size)
    return damaged


def _require_listable(folder: Path) -> None:
    """Check that all folders can be read: ``rglob`` skips the others, whose files would be reported as missing.

    Raises:
        StorageError: A folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise _unreadable(error, folder) from error

    for _ in os.walk(folder, onerror=fail):
        pass


def _read_through(file: Path, found: ScrubbedCheckpoint, damaged: set[Path]) -> None:
    try:
        check_records(file, tensors=True)
    except CheckpointError as error:
        if isinstance(error.__cause__, PermissionError):
            found.unknown.append(str(error))
        else:
            damaged.add(file)
            found.damaged.append(error.problem)
        return
    try:
        check_plain(file)
    except CheckpointError as error:  # it needs consent
        found.unknown.append(str(error))
    except PermissionError as error:
        found.unknown.append(str(refused(file, error)))
    except DAMAGE as error:
        damaged.add(file)
        found.damaged.append(f"{file} is damaged: {type(error).__name__}: {error}.")


def _of_ordinary(folder: Path, files: Sequence[Path], damaged: Collection[Path]) -> Iterator[str]:
    yield from _raised_by(partial(require_latest, folder), folder)
    missing = list(_missing(files))
    yield from missing
    if not damaged and not missing:
        yield from _raised_by(partial(_require_one_checkpoint, ZeroFolder(folder, rank=0, world_size=1)), folder)


def _require_one_checkpoint(saved: ZeroFolder) -> None:
    saved.require_whole()
    saved.require_one_save()
    for rank in range(saved.num_saved):
        with closing(TensorFile(saved.optimizer_file(rank))) as file:
            saved.masters(file, rank)


def _of_universal(folder: Path, files: Sequence[Path], damaged: Collection[Path]) -> Iterator[str]:
    saved = UniversalFolder(folder, rank=0, world_size=1)
    yield from _missing(files)
    if {saved.model_file(0), folder / "zero" / "optimizer_state.pt", folder / "zero" / CHECKSUMS_NAME} & set(damaged):
        return
    if not damaged:
        yield from _raised_by(saved.require_one_save, folder)
    yield from _raised_by(saved.check_save, folder)
    yield from _raised_by(saved.require_checksums, folder)
    arrays: list[tuple[str, str, int]] = []
    yield from _raised_by(lambda: arrays.extend(_arrays_of(saved)), folder)
    for name, array, numel in arrays:
        file = saved.array_file(name, array)
        if file not in damaged:
            yield from _raised_by(partial(_require_array, saved, name, array, numel), file)


def _arrays_of(saved: UniversalFolder) -> Iterator[tuple[str, str, int]]:
    """Yield the parameter, the array and the number of elements of every required file."""
    for name, shape in saved.shapes.items():
        for array in (MASTERS, *saved.arrays):
            yield name, array, shape.numel()


def _require_array(saved: UniversalFolder, name: str, array: str, numel: int) -> None:
    saved.require_array(name, array, numel=numel)
    for begin, end in windows(0, numel):
        saved.read(name, array, begin, np.empty(end - begin, np.float32))


def _raised_by(check: Callable[[], object], path: Path) -> Iterator[str]:
    """Yield the problem that a check raises, if it raises.

    Raises:
        StorageError: This user may not read a file, so its state is unknown.
    """
    try:
        with reading_checkpoint(path), doing_now("Reading", path):
            check()
    except CheckpointError as error:
        if isinstance(error.__cause__, PermissionError):
            raise _unreadable(error.__cause__, path) from error
        yield error.problem


def _unreadable(error: OSError, path: Path) -> StorageError:
    problem = f"Reading {str(error.filename or path)!r} failed: {error.strerror or error}."
    if isinstance(error, PermissionError):
        return StorageError(problem, PERMISSION_REMEDY)
    return storage_error(error.errno or 0, problem=problem)


def _missing(files: Sequence[Path]) -> Iterator[str]:
    """Yield sentences about missing files, up to the largest rank; the first few by name, as there may be billions."""
    found: dict[str, set[int]] = {"model": set(), "optim": set()}
    for file in files:
        named = _RANK.search(file.name)
        if named is not None:
            found[named[2]].add(int(named[1]))
    num_ranks = 1 + max((rank for of_kind in found.values() for rank in of_kind), default=-1)
    for kind, of_kind in found.items():
        num_missing = num_ranks - len(of_kind) if of_kind else 0
        missing = (rank for rank in range(num_ranks) if rank not in of_kind)
        for rank in islice(missing, min(num_missing, _NAMED)):
            yield f"The {kind} states of rank {rank} are missing."
        if num_missing > _NAMED:
            yield f"The {kind} states of {num_missing - _NAMED} further ranks are missing."
