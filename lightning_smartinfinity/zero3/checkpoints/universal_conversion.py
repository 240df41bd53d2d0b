"""Makes a universal checkpoint: joins the slices that processes saved of each parameter in files of its own.

DeepSpeed's ``ds_to_universal`` knows only Adam's moments. This module writes the same layout, described in
:mod:`lightning_smartinfinity.zero3.checkpoints.universal_folder`, for all arrays that an optimizer keeps. It uses
bounded memory, and verifies the checksums of everything that it reads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
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
from lightning_smartinfinity.errors import CheckpointError, SmartInfinityError
from lightning_smartinfinity.progress import Show, hidden
from lightning_smartinfinity.store.in_time import unless_idle
from lightning_smartinfinity.store.replacement import beside, flush_names, flush_tree
from lightning_smartinfinity.store.staging_folder import (
    make_staging,
    remove_staging,
    remove_staging_unless_idle,
    require_own_staging,
)
from lightning_smartinfinity.zero3.checkpoints.block_checksums import CHECKSUMMED, CHECKSUMS_NAME, BlockChecksums
from lightning_smartinfinity.zero3.checkpoints.folder_check import reading_checkpoint, tagged_folder
from lightning_smartinfinity.zero3.checkpoints.loss_scale import loss_scaler_of, numbers_of
from lightning_smartinfinity.zero3.checkpoints.note import note_for
from lightning_smartinfinity.zero3.checkpoints.saved_weights import WINDOW_NUMEL, SavedSlice, slices_of, windows
from lightning_smartinfinity.zero3.checkpoints.stock_checkpoint import STEP
from lightning_smartinfinity.zero3.checkpoints.tensor_file import (
    TensorStream,
    room_for,
    saved_with_room,
)
from lightning_smartinfinity.zero3.checkpoints.trust import door
from lightning_smartinfinity.zero3.checkpoints.zero_folder import ZeroFolder

__all__ = ["convert_checkpoint"]


def convert_checkpoint(
    checkpoint: str | Path, into: str | Path, *, weights_only: bool = True, show: Show = hidden
) -> None:
    """Make a universal checkpoint from an ordinary one of this strategy or of stock DeepSpeed, which stays.

    The result is complete or absent. The next conversion removes what a killed process left beside ``into``.

    Args:
        checkpoint: The folder that Lightning or DeepSpeed saved, or the folder in it that holds the files.
        into: A folder that does not exist yet.
        weights_only: Whether the checkpoint may hold nothing but tensors, numbers, text and containers of them. False
            is for checkpoints that you trust: loading other types runs code that a file names.
        show: Shows the progress.

    Raises:
        CheckpointError: The checkpoint is damaged, holds weights only, or ``into`` cannot be written.
    """
    with door(weights_only, consent="--no-weights-only (in Python, weights_only=False)"):
        _convert(checkpoint, into, show)


def _convert(checkpoint: str | Path, into: str | Path, show: Show) -> None:
    with reading_checkpoint(checkpoint):
        source = ZeroFolder(tagged_folder(Path(checkpoint)), rank=0, world_size=1)
        source.check_states()
    with _staged_folder(Path(os.path.realpath(into))) as folder, closing(source):
        with reading_checkpoint(source.path):
            by_rank = [source.streams(rank) for rank in range(source.num_saved)]
        streams = {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}
        _write_arrays(source, streams, folder / "zero", show)
        _write_optimizer_state(source, folder / "zero" / "optimizer_state.pt")
        for rank in range(source.num_saved):
            shutil.copy2(source.model_file(rank), folder)
        (folder / NOTE_NAME).write_text(note_for(into, source.model_states_of(0)), encoding="utf-8")


@contextmanager
def _staged_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``target`` when the body ends; if the body raises, nothing is left."""
    staging = beside(target)
    try:
        if target.exists():
            raise CheckpointError(f"{target} exists already.", "Remove it, or name another folder.")
        require_own_staging(staging)
        remove_staging(staging)
        make_staging(staging)
        new = staging / "new"
        (new / "zero").mkdir(parents=True)
        yield new
        flush_tree(new)
        unless_idle(partial(os.rename, new, target), doing="Renaming", path=target)
        flush_names(target)
    except SmartInfinityError:
        raise
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise CheckpointError(
            f"The universal checkpoint {target} could not be written: {error}.",
            "Free space there, or name a folder elsewhere.",
        ) from error
    finally:
        remove_staging_unless_idle(staging)


# ---- masters and other arrays


def _write_arrays(source: ZeroFolder, arrays: Mapping[str, Sequence[TensorStream]], folder: Path, show: Show) -> None:
    shapes = source.shapes
    numel = sum(shape.numel() for shape in shapes.values())
    buffer = np.empty(min(WINDOW_NUMEL, max((shape.numel() for shape in shapes.values()), default=0)), np.float32)
    slices_by_rank = [slices_of(shapes, rank=rank, world_size=source.num_saved) for rank in range(source.num_saved)]
    checksums = {}
    with show("Converting the optimizer state", buffer.itemsize * numel * len(arrays)) as advance:
        for slices in zip(*slices_by_rank, strict=True):
            (folder / slices[0].name).mkdir(parents=True, exist_ok=True)
            for name, streams in arrays.items():
                file = f"{slices[0].name}/{name}.pt"
                written = _write_array(folder / file, streams, slices, buffer, source.path)
                checksums[file] = torch.tensor(written.values)
                advance(buffer.itemsize * slices[-1].end)
    torch.save(checksums, folder / CHECKSUMS_NAME)


def _write_array(
    file: Path, streams: Sequence[TensorStream], slices: Sequence[SavedSlice], buffer: NDArray[np.float32], source: Path
) -> BlockChecksums:
    """Write one array of one parameter, of which every process saved a slice, and return its checksums."""
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


def _write_optimizer_state(source: ZeroFolder, file: Path) -> None:
    """Write the optimizer state that the first process saved, with an empty tensor in place of every array."""
    saved = source.optimizer_states
    flat = saved[OPTIMIZER_STATE_DICT]
    states = {
        index: {name: value if name == STEP else torch.empty(0) for name, value in state.items()}
        for index, state in flat["state"].items()
    }
    converted = {**saved, FP32_FLAT_GROUPS: [], OPTIMIZER_STATE_DICT: {**flat, "state": states}}
    if LOSS_SCALER in saved:  # stock DeepSpeed saves objects here, which only the user's consent would load again
        converted[LOSS_SCALER] = numbers_of(loss_scaler_of(saved[LOSS_SCALER]))
    converted[ZERO_STAGE] = int(ZeroStageEnum.weights)
    torch.save({**converted, PARAM_GROUPS: flat["param_groups"], CHECKSUMMED: True}, file)
