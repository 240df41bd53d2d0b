"""Reads an exported folder, or one file of it, and compares it with its checksums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_smartinfinity.common.progress import Show
from lightning_smartinfinity.errors import CheckpointError, SmartInfinityError
from lightning_smartinfinity.export.checksums import CHECKSUMS_NAME, ExportChecksums, read_checksums
from lightning_smartinfinity.storage.io.files import bounded, listed
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import ScrubbedCheckpoint

__all__ = ["is_export", "scrub_export"]

_WEIGHTS = "*.safetensors"


@bounded("Looking at")
def is_export(path: Path) -> bool:
    """Return whether a path is a safetensors file, or a folder of such files that is no checkpoint or has checksums."""
    if path.is_dir():
        return (path / CHECKSUMS_NAME).exists() or (any(path.glob(_WEIGHTS)) and not (path / "latest").exists())
    return path.match(_WEIGHTS) and path.exists()


def scrub_export(path: Path, *, show: Show) -> ScrubbedCheckpoint:
    """Read the weights and the index of an export, and compare every byte with its checksum.

    Args:
        path: The folder, or one safetensors file in it.
        show: Function that shows the progress.
    """
    found = ScrubbedCheckpoint()
    folder = path if path.is_dir() else path.parent
    try:
        checksums = read_checksums(folder)
        if checksums is None:
            found.unknown.append(f"{path} has no checksums: there is no {CHECKSUMS_NAME}, so nothing was compared.")
        else:
            files = sorted({*checksums.files, *(file.name for file in listed(folder, _WEIGHTS))})
            _compare(checksums, files if path.is_dir() else [path.name], found, show)
    except CheckpointError as error:  # the file of the checksums is damaged
        found.damaged.append(error.problem)
    except SmartInfinityError as error:  # still report what was found before
        found.unknown.append(str(error))
    return found


def _compare(checksums: ExportChecksums, files: Sequence[str], found: ScrubbedCheckpoint, show: Show) -> None:
    known = {file: checksums.files[file] for file in files if file in checksums.files}
    nbytes = sum(part.nbytes for parts in known.values() for part in parts.values())
    with show(f"Reading {checksums.folder}", nbytes) as advance:
        for file in files:
            if file in known:
                found.damaged.extend(checksums.damage(file, advance))
                found.files.append(checksums.folder / file)
            else:
                found.unknown.append(
                    f"{checksums.folder / file} has no checksums: it was added or renamed after the export."
                )
