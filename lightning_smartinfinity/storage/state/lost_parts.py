"""Finds out which storage folders of a rank's state are missing, and explains how to go on without them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.settings.transfer import TransferConfig
from lightning_smartinfinity.settings.user_calls import UserCalls, user_calls
from lightning_smartinfinity.storage.folders.lock import read_notes
from lightning_smartinfinity.storage.folders.lock_content import REMOVED, checkpoint_in
from lightning_smartinfinity.storage.folders.manifest import MANIFEST_NAME, Manifest, read_manifest
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder, Trust, refuse_foreign
from lightning_smartinfinity.storage.folders.rank_folder import TRAINING_NAMES, open_rank_folder, rank_folder_path
from lightning_smartinfinity.storage.records.training_record import TrainingRecord, read_training_records

__all__ = [
    "FoundPart",
    "changed_places",
    "found_everywhere",
    "lost_parts",
    "may_have_steps",
    "recorded_calls",
    "refuse_lost",
    "require_present",
    "right_folders",
]

_DEFAULT_JOB = TransferConfig().job


class FoundPart(NamedTuple):
    """A part of a rank's state that was found.

    Args:
        storage: The storage folder in which it was found.
        job: ``TransferConfig.job``.
        manifest: The manifest there.
        checkpoint: Step and path of the training's newest checkpoint; None if unknown.
    """

    storage: Path
    job: str
    manifest: Manifest
    checkpoint: tuple[int, str] | None


def lost_parts(parts: Sequence[FoundPart], *, calls: Callable[[], UserCalls | None]) -> StorageError | None:
    """Return an error that names the missing parts of a rank's state, and how to go on; None if all are there.

    A part that was not found is looked for in the storage folders that the manifests name.

    Args:
        parts: The parts of one store of one rank that were found, at least one.
        calls: Function that returns the calls to go on with; None if the entry point is unknown.
    """
    first, found = parts[0].manifest, found_everywhere(parts)
    missing = _missing_folders(first, found)
    if not missing:
        return None
    left = [str(found[device]) for device in sorted(found)]
    lost = ", ".join(repr(str(rank_folder_path(storage, job=parts[0].job, rank=first.rank))) for storage in missing)
    drives = ", ".join(repr(str(storage)) for storage in missing)
    job = "" if parts[0].job == _DEFAULT_JOB else f" and transfer={{'job': {parts[0].job!r}}}"
    return StorageError(
        f"{lost} cannot be found: of the {len(first.folders)} storage folders of this optimizer state, "
        f"{list(first.folders)!r}, {drives} lacks its part.",
        f"Mount {drives}. If it is lost, go on {_from_checkpoint(parts, calls)} with the other folders: "
        f"storage={left!r}{job}.",
    )


def right_folders(parts: Sequence[FoundPart]) -> str:
    """Return ``storage=[...]`` with the storage folders of a rank's state, in the order of its parts.

    Mounts may have been exchanged since the manifests were written. A part that is not found has the folder of that
    time.

    Args:
        parts: As for :func:`lost_parts`.
    """
    found = found_everywhere(parts)
    folders = [str(found.get(device, storage)) for device, storage in enumerate(parts[0].manifest.folders)]
    return f"storage={folders!r}"


def changed_places(parts: Sequence[FoundPart]) -> str | None:
    """Return a sentence if parts of a rank's state are in each other's storage folders, else None.

    Args:
        parts: As for :func:`lost_parts`.
    """
    folders = parts[0].manifest.folders
    found = {device: os.path.abspath(storage) for device, storage in found_everywhere(parts).items()}
    if all(storage == folders[device] or storage not in folders for device, storage in found.items()):
        return None
    return (
        f"The parts of the optimizer state of the job {parts[0].job!r} have changed places since they were written, as "
        f"if drives had exchanged their mounts. To resume, name the folders in this order: {right_folders(parts)}."
    )


def found_everywhere(parts: Sequence[FoundPart]) -> dict[int, Path]:
    """Return the storage folder of each part, by device: those found, and those in the folders of the manifests."""
    found = {part.manifest.device: part.storage for part in reversed(parts)}
    for device, storage in enumerate(map(Path, parts[0].manifest.folders)):
        if storage not in found.values():
            there = _device_at(storage, parts[0], unread=device)
            if there is not None:
                found.setdefault(there, storage)
    return found


def _missing_folders(manifest: Manifest, found: Mapping[int, Path]) -> list[Path]:
    """Return the storage folder of each missing part. If its mount has another part now, it is one without a part."""
    free = [storage for storage in map(Path, manifest.folders) if storage not in found.values()]
    absent = [Path(storage) for device, storage in enumerate(manifest.folders) if device not in found]
    return [storage if storage in free else next(iter(free), storage) for storage in absent]


def _from_checkpoint(parts: Iterable[FoundPart], calls: Callable[[], UserCalls | None]) -> str:
    step, path = max((part.checkpoint for part in parts if part.checkpoint is not None), default=(0, ""))
    if not path:
        return "from a checkpoint, or begin anew,"
    if not os.path.isdir(path):
        return f"from a checkpoint (the newest, {path!r} after step {step}, is gone)"
    advised = calls()
    call = repr(path) if advised is None else advised.from_checkpoint.format(path=path)
    return f"from the newest checkpoint, after step {step}: {call},"


def recorded_calls(
    parts: Iterable[FoundPart], calls_of: Callable[[TrainingRecord], UserCalls | None]
) -> UserCalls | None:
    """Return the calls of the entry point that trained; None if no training record of the parts can be read.

    Args:
        parts: As for :func:`lost_parts`.
        calls_of: Function that returns the calls of the entry point that wrote a record; None if it cannot be read.
    """
    for part in parts:
        path = rank_folder_path(part.storage, job=part.job, rank=part.manifest.rank)
        with suppress(OSError, StorageError), closing(open_rank_folder(path)) as folder:
            records = read_training_records(folder, identity=part.manifest.identity)
            if (calls := next(filter(None, map(calls_of, records)), None)) is not None:
                return calls
    return None


def _device_at(storage: Path, like: FoundPart, *, unread: int) -> int | None:
    """Return which part of the same state is in a storage folder; None if none is, ``unread`` if it is unreadable."""
    path = rank_folder_path(storage, job=like.job, rank=like.manifest.rank)
    try:
        with closing(open_rank_folder(path, trust=Trust.ANY)) as folder:
            manifest = None if folder.status(MANIFEST_NAME) is None else read_manifest(folder)
            if manifest is None and may_have_steps(folder, read_notes(folder)):
                return unread
    except OSError:
        return None
    except StorageError:  # the folder exists; opening it raises the reason
        return unread
    return manifest.device if manifest is not None and manifest.job == like.manifest.job else None


def may_have_steps(folder: OpenFolder, notes: Collection[str]) -> bool:
    """Return whether training records were made in a rank's folder, by its files or its lock, and no removal began.

    Raises:
        StorageError: A file there is not trusted.
    """
    made = set(TRAINING_NAMES).issubset(notes) or any(map(folder.status, TRAINING_NAMES))
    return made and REMOVED not in notes


def refuse_lost(folders: Sequence[Path], *, job: str, rank: int) -> None:
    """Check that no part of a rank's state is missing, as far as the manifests in these storage folders show.

    Raises:
        StorageError: Parts are missing, or more storage folders are named than the state has.
    """
    found = list(_found_in(folders, job, rank))
    same = [part for part in found if part.manifest.job == found[0].manifest.job]
    error = lost_parts(same, calls=user_calls) if same else None
    if error is not None:
        raise error
    number = len(same[0].manifest.folders) if same else 0
    if same and len(folders) > number:
        raise StorageError(
            f"The optimizer state in {str(same[0].storage)!r} (job {job!r}) is in {number} storage folders; "
            f"{len(folders)} named.",
            f"Name those that have it: {right_folders(same)}.",
        )


def _found_in(folders: Sequence[Path], job: str, rank: int) -> Iterable[FoundPart]:
    for storage in map(Path, map(os.path.abspath, folders)):
        with (
            suppress(OSError, StorageError),  # opening the folder raises the reason
            closing(open_rank_folder(rank_folder_path(storage, job=job, rank=rank))) as folder,
        ):
            yield FoundPart(storage, job, read_manifest(folder), checkpoint_in(read_notes(folder)))


def require_present(path: Path, *, among: Collection[Path]) -> None:
    """Check that a rank's folder exists.

    Args:
        path: Path of the folder.
        among: The storage folders of the rank.

    Raises:
        StorageError: It is missing, or another user's.
    """
    try:
        os.lstat(path)
    except PermissionError:
        for folder in (path.parent, path.parents[1]):
            if not os.access(folder, os.X_OK):
                refuse_foreign(folder)
        raise StorageError(f"{str(path)!r} cannot be read: permission denied.", "Check the folder's mode.") from None
    except OSError:
        refuse_lost(list(among), job=path.parent.name, rank=int(path.name.removeprefix("rank-")))
        raise StorageError(
            f"There is no optimizer state in {str(path)!r}.",
            f"Check the storage folder and the job, or {user_calls().begins_anew} to begin anew. If another machine "
            "has that folder, start the machines in the order of before, or copy it here (cp -r).",
        ) from None
