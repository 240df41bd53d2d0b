"""Converts a checkpoint to a universal one: joins the processes' slices of each parameter in separate files.

DeepSpeed's ``ds_to_universal`` converts only Adam's moments. This module writes the same layout, described in
:mod:`~lightning_smartinfinity.zero3.checkpoints.formats.universal_folder`, for all arrays that an optimizer keeps. It
uses bounded memory, and verifies the checksums of everything that it reads.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM_GROUPS,
    ZERO_STAGE,
)
from deepspeed.runtime.zero.config import ZeroStageEnum
from numpy.typing import NDArray

from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.common.progress import Show, hidden
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.folders.replacement import beside, flush_names, flush_tree
from lightning_smartinfinity.storage.folders.staging_folder import locked, remove_content
from lightning_smartinfinity.storage.io.deadlines import doing_now
from lightning_smartinfinity.storage.io.files import is_unused, limited, resolved
from lightning_smartinfinity.zero3.checkpoints.folders.flushed_file import save_flushed
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import writing
from lightning_smartinfinity.zero3.checkpoints.folders.note import note_for
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import (
    CHECKSUMMED,
    CHECKSUMS_NAME,
    BlockChecksums,
)
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint, tagged_folder
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import loss_scaler_of, numbers_of
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import WINDOW_NUMEL, SavedSlice, slices_of, windows
from lightning_smartinfinity.zero3.checkpoints.formats.stock_checkpoint import STEP
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import (
    TensorStream,
    room_for,
    saved_with_room,
)
from lightning_smartinfinity.zero3.checkpoints.formats.trust import loading_policy
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["convert_checkpoint"]


def convert_checkpoint(
    checkpoint: str | Path,
    into: str | Path,
    *,
    parts: Sequence[str | Path] = (),
    weights_only: bool = True,
    show: Show = hidden,
) -> None:
    """Create a universal checkpoint from an ordinary one of this strategy or of stock DeepSpeed, which stays.

    The result is complete or absent. The next conversion removes a killed process's staging folder next to ``into``.

    Args:
        checkpoint: The folder that Lightning or DeepSpeed saved, or the folder in it that holds the files.
        into: A folder that does not exist yet, or is empty.
        parts: The other machines' folders of the same checkpoint, if each machine saved to its own file system.
        weights_only: Whether the checkpoint may hold only tensors, numbers, text and containers of these. False is for
            checkpoints that you trust: loading other types runs code that a file names.
        show: Function that shows the progress.

    Raises:
        CheckpointError: The checkpoint is damaged, holds weights only, or ``into`` cannot be written.
    """
    with loading_policy(weights_only, consent="--no-weights-only (in Python, weights_only=False)"):
        _convert(checkpoint, parts, into, show)


def _convert(checkpoint: str | Path, parts: Sequence[str | Path], into: str | Path, show: Show) -> None:
    with reading_checkpoint(checkpoint):
        source = limited("Reading", checkpoint, _checked_source, checkpoint, parts)
    with _staged_folder(into) as folder, closing(source):
        with reading_checkpoint(source.path):
            by_rank = limited("Reading", source.path, lambda: list(map(source.streams, range(source.num_saved))))
        streams = {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}
        _write_arrays(source, streams, folder / "zero", show)
        state = limited("Reading", source.path, _optimizer_state, source)
        save_flushed(state, folder / "zero" / "optimizer_state.pt")
        limited("Writing", folder, _write_rest, source, folder, into)


def _checked_source(checkpoint: str | Path, parts: Sequence[str | Path]) -> ZeroFolder:
    folder, *others = map(tagged_folder, map(Path, (checkpoint, *parts)))
    source = ZeroFolder(folder, rank=0, world_size=1, parts=others)
    source.check_states()
    return source


def _write_rest(source: ZeroFolder, folder: Path, into: str | Path) -> None:
    for rank in range(source.num_saved):
        with doing_now("Copying", source.model_file(rank)):
            shutil.copy2(source.model_file(rank), folder)
    note = note_for(into, source.model_states_of(0))
    (folder / NOTE_NAME).write_text(note, encoding="utf-8", errors="surrogateescape")


@contextmanager
def _staged_folder(into: str | Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``into`` when the body ends; if the body raises, it is removed."""
    with writing(into):
        target = resolved(into)
        staging = beside(target)
        new = staging / uuid.uuid4().hex
        with locked(staging, into):
            limited("Preparing", target, _prepare, staging, new, target)
            yield new
            flush_tree(new)
            limited("Renaming", target, os.rename, new, target)
            flush_names(target)


def _prepare(staging: Path, new: Path, target: Path) -> None:
    if not is_unused(target):
        raise CheckpointError(f"{target} exists already.", "Remove it, or name another folder.")
    remove_content(staging)
    (new / "zero").mkdir(parents=True)


# ---- masters and other arrays


def _write_arrays(source: ZeroFolder, arrays: Mapping[str, Sequence[TensorStream]], folder: Path, show: Show) -> None:
    shapes = source.shapes
    numel = sum(shape.numel() for shape in shapes.values())
    buffer = np.empty(min(WINDOW_NUMEL, max((shape.numel() for shape in shapes.values()), default=0)), np.float32)
    slices_by_rank = [slices_of(shapes, rank=rank, world_size=source.num_saved) for rank in range(source.num_saved)]
    checksums = {}
    with show("Converting the optimizer state", buffer.itemsize * numel * len(arrays)) as advance:
        for slices in zip(*slices_by_rank, strict=True):
            parameter = folder / slices[0].name
            limited("Creating", parameter, parameter.mkdir, parents=True, exist_ok=True)
            for name, streams in arrays.items():
                file = f"{slices[0].name}/{name}.pt"
                written = _write_array(folder / file, streams, slices, buffer, source.path)
                checksums[file] = torch.tensor(written.values)
                advance(buffer.itemsize * slices[-1].end)
    save_flushed(checksums, folder / CHECKSUMS_NAME)


def _write_array(
    file: Path, streams: Sequence[TensorStream], slices: Sequence[SavedSlice], buffer: NDArray[np.float32], source: Path
) -> BlockChecksums:
    """Join all processes' slices of one parameter's array in a file, and return its block checksums."""
    checksums = BlockChecksums()
    with closing(saved_with_room(room_for(slices[-1].end), file)) as written:
        whole = written.stream([written.state])
        for stream, each in zip(streams, slices, strict=True):
            for begin, end in windows(each.begin, each.end + each.padding):
                values = buffer[: end - begin]
                with reading_checkpoint(source):
                    stream.read(values)
                values = values[: max(0, each.end - begin)]
                whole.write(values)
                checksums.add(values)
    return checksums


# ---- state other than arrays


def _optimizer_state(source: ZeroFolder) -> SavedState:
    """Return the first process's optimizer state, with an empty tensor in place of every array."""
    saved = source.optimizer_states
    flat = saved[OPTIMIZER_STATE_DICT]
    states = {
        index: {name: value if name == STEP else torch.empty(0) for name, value in state.items()}
        for index, state in flat["state"].items()
    }
    converted = {**saved, FP32_FLAT_GROUPS: [], OPTIMIZER_STATE_DICT: {**flat, "state": states}}
    if LOSS_SCALER in saved:  # stock DeepSpeed saves objects, which need the user's consent to load
        converted[LOSS_SCALER] = numbers_of(loss_scaler_of(saved[LOSS_SCALER]))
    converted[ZERO_STAGE] = int(ZeroStageEnum.weights)
    return {**converted, PARAM_GROUPS: flat["param_groups"], CHECKSUMMED: True}
