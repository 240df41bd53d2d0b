"""Reads every file of a checkpoint that has checksums, and compares it with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.progress import Advance, Show
from lightning_smartinfinity.zero3.checkpoints.block_checksums import CHECKSUMS_NAME, verified
from lightning_smartinfinity.zero3.checkpoints.folder_check import optimizer_files, reading_checkpoint, tagged_folder
from lightning_smartinfinity.zero3.checkpoints.tensor_file import check_records
from lightning_smartinfinity.zero3.checkpoints.trust import load_file

__all__ = ["ScrubbedCheckpoint", "scrub_checkpoint"]

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_(model|optim)_states\.pt")
_REMEDY = "Use another checkpoint."


@dataclass(frozen=True, kw_only=True)
class ScrubbedCheckpoint:
    """Tells how much of a checkpoint was read, and which of it is damaged.

    Args:
        num_files: Number of files that were read.
        damaged: A sentence about everything that is damaged or missing.
    """

    num_files: int
    damaged: tuple[str, ...]


def scrub_checkpoint(path: Path, *, show: Show) -> ScrubbedCheckpoint:
    """Read all files of ``torch.save`` in a checkpoint, universal or not.

    Nothing there changes, except that a save that was interrupted in the middle is put back as a load would do it.

    Args:
        path: The folder that was saved.
        show: Shows the progress.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    universal = (path / "zero").is_dir()
    folder = path if universal else tagged_folder(path)
    files = sorted(folder.rglob("*.pt"))
    if not files or not (universal or optimizer_files(folder)):
        raise CheckpointError(f"{path} holds no checkpoint of ZeRO-3.", "Pass the folder that was saved.")
    with show(f"Reading {path}", sum(file.stat().st_size for file in files)) as advance:
        damaged = [*_damaged_files(files, advance), *_missing(files)]
    if universal:
        damaged += _damaged_blocks(folder / "zero", {sentence.split(" is damaged")[0] for sentence in damaged})
    return ScrubbedCheckpoint(num_files=len(files), damaged=tuple(damaged))


def _damaged_files(files: list[Path], advance: Advance) -> Iterator[str]:
    for file in files:
        problem = _problem(file)
        if problem is not None:
            yield problem
        advance(file.stat().st_size)


def _problem(file: Path) -> str | None:
    try:
        check_records(file, tensors=True, remedy=_REMEDY)
    except CheckpointError as error:
        return error.problem
    return None


def _missing(files: list[Path]) -> Iterator[str]:
    """Name the ranks below the largest, of which a file is missing."""
    found: dict[str, set[int]] = {"model": set(), "optim": set()}
    for file in files:
        named = _RANK.search(file.name)
        if named is not None:
            found[named[2]].add(int(named[1]))
    ranks = range(max((rank for of_kind in found.values() for rank in of_kind), default=-1) + 1)
    for kind, of_kind in found.items():
        if of_kind:
            yield from (f"The {kind} states of rank {rank} are missing." for rank in ranks if rank not in of_kind)


def _damaged_blocks(zero: Path, known: set[str]) -> Iterator[str]:
    """Compare arrays with the checksums of their blocks, which DeepSpeed's own universal folders lack."""
    sums = zero / CHECKSUMS_NAME
    if not sums.is_file() or str(sums) in known:
        return
    try:
        with reading_checkpoint(sums):
            checksums = load_file(sums, map_location="cpu")
            listed = {str(name): list(map(int, values)) for name, values in checksums.items()}
    except CheckpointError as error:
        yield error.problem
        return
    for name, values in listed.items():
        file = zero / name
        if str(file) in known:
            continue
        problem = _block_problem(file, values)
        if problem is not None:
            yield problem


def _block_problem(file: Path, checksums: list[int]) -> str | None:
    if not file.is_file():
        return f"{file} is missing."
    try:
        with reading_checkpoint(file):
            values = load_file(file, map_location="cpu", mmap=True)
            if not isinstance(values, torch.Tensor) or values.dtype != torch.float32:
                return f"{file} is damaged: it holds no tensor of float32."
            flat = values.detach().flatten()
            verified(flat, 0, flat.numel(), checksums, file=file, remedy=_REMEDY)
    except CheckpointError as error:
        return error.problem
    return None
