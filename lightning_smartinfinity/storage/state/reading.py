"""Opens a rank's store for reading; nothing there changes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageCorruptError
from lightning_smartinfinity.storage.folders.direct import open_state_file
from lightning_smartinfinity.storage.folders.manifest import Manifest
from lightning_smartinfinity.storage.folders.rank_folder import STATE_NAME, read_rank_folder
from lightning_smartinfinity.storage.state.commit_record import CommitRecord
from lightning_smartinfinity.storage.state.recovery import common_manifest, records_of

__all__ = ["StoreToRead", "open_to_read"]


@dataclass(frozen=True, kw_only=True)
class StoreToRead:
    """One generation of a store, which no process changes while it is open.

    Args:
        manifest: The content of manifest.json.
        record: The commit record of the generation.
        files: State file of each storage folder.
    """

    manifest: Manifest
    record: CommitRecord
    files: tuple[native.StateFile, ...]


def open_to_read(paths: Sequence[Path], *, rank: int, generation: int, opened: ExitStack) -> StoreToRead:
    """Open a generation of a rank's store.

    Args:
        paths: The rank's folders, in the order of its storage folders.
        rank: Number of the rank.
        generation: The generation.
        opened: Receives callbacks that close the files and unlock the folders.

    Raises:
        StorageLockedError: A process uses one of the folders.
        StorageCorruptError: The folders are not those of one store, or no longer hold the generation.
        StorageError: A folder or file cannot be opened.
    """
    folders = [opened.enter_context(read_rank_folder(path)) for path in paths]
    manifest = common_manifest(folders, rank=rank)
    record = next((each for each in records_of(folders[0], manifest).intact if each.generation == generation), None)
    if record is None:
        raise StorageCorruptError(
            f"{str(folders[0].path)!r} no longer holds generation {generation}.",
            "Another process has changed it: begin anew, or resume from a checkpoint.",
        )
    files = []
    for folder in folders:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is read once may go through the page cache
            files.append(open_state_file(folder, STATE_NAME, "auto", access=os.O_RDONLY))
        opened.callback(files[-1].close)
    return StoreToRead(manifest=manifest, record=record, files=tuple(files))
