"""Writes one file for ``LightningModule.load_from_checkpoint``, window by window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_smartinfinity.checkpoint_hint import LIGHTNING_KEY
from lightning_smartinfinity.common.fake_tensors import fake_tensors
from lightning_smartinfinity.common.progress import showing_progress
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.export.destination import require_room, staged
from lightning_smartinfinity.export.routes import ExportPlan, plain_plan, router
from lightning_smartinfinity.resume.random_states import RNG_KEY
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_weights import CheckpointWeights
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import PartChecksums
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, TensorStream, saved_with_room
from lightning_smartinfinity.zero3.checkpoints.formats.whole_file import CHECKSUMS_KEY, room_for_checksums

__all__ = ["write_lightning_file"]

_SMALL_BYTES = 1 << 20


def write_lightning_file(source: CheckpointWeights, target: Path, *, dtype: torch.dtype) -> ExportPlan:
    """Write the weights of a checkpoint, and the other data that Lightning saved with them.

    Args:
        source: The checkpoint.
        target: Path of the file, which does not exist.
        dtype: Dtype of trained weights; fp32 writes the masters unchanged.

    Returns:
        The plan of the weights that were written.

    Raises:
        CheckpointError: The checkpoint is damaged, or Lightning did not save it.
        StorageError: The file cannot be written.
    """
    plan = plain_plan(source.contents, dtype=dtype)
    require_room(target, plan.nbytes + _SMALL_BYTES)
    # torch.save itself writes the buffers.
    nbytes = sum(plan.tensors[name].nbytes for name in source.contents.parameters)
    with (
        staged(target) as path,
        _weights_file(source, plan, path) as streams,
        showing_progress("Exporting", nbytes, shown=True) as advance,
    ):
        put = router(plan, source.contents, streams.write, advance)
        source.read(list(source.contents.parameters), put, masters=True)
    return plan


@contextmanager
def _weights_file(source: CheckpointWeights, plan: ExportPlan, path: Path) -> Iterator[_Streams]:
    with fake_tensors():
        rooms = {
            name: torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in plan.tensors.items()
            if name not in source.contents.buffers
        }
        checksums = room_for_checksums(list(rooms), [room.nbytes for room in rooms.values()])
    with storage_errors("Writing", path):
        file = saved_with_room({**_checkpoint(source, rooms), CHECKSUMS_KEY: checksums}, path)
    with closing(file):
        streams = _Streams(file, path, rooms)
        yield streams
        with storage_errors("Writing", path):
            streams.write_checksums()
            file.flush()


def _checkpoint(source: CheckpointWeights, rooms: dict[str, torch.Tensor]) -> dict[str, Any]:
    contents = source.contents
    state_dict = {
        name: rooms[contents.aliases.get(name, name)]
        if name in rooms or name in contents.aliases
        else contents.buffers[name]
        if name in contents.buffers
        else source.other(name)
        for name in source.state_dict_order()
    }
    state = {key: value for key, value in source.client_state().items() if key != RNG_KEY}
    if LIGHTNING_KEY not in state:
        raise CheckpointError(
            f"{source.path} was not saved by a Trainer of Lightning: it has no {LIGHTNING_KEY!r}.",
            "Export --to safetensors.",
        )
    return {**state, "state_dict": state_dict}


class _Streams:
    """A stream into the file for every tensor, because windows of several tensors alternate."""

    def __init__(self, file: TensorFile, path: Path, rooms: dict[str, torch.Tensor]) -> None:
        self._path = path
        self._unwritten = {name: room.numel() for name, room in rooms.items()}
        saved = file.state["state_dict"]
        self._streams: dict[str, TensorStream] = {name: file.stream([saved[name]]) for name in rooms}
        self._checksums = {name: PartChecksums(room.nbytes) for name, room in rooms.items()}
        self._of_checksums = file.stream([file.state[CHECKSUMS_KEY]["crc32c"]])
        self._ends = dict.fromkeys(rooms, 0)

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        assert begin == self._ends[name], "checksums need the elements in order"
        content = values.contiguous().view(torch.uint8).numpy()
        self._checksums[name].add(begin * values.element_size(), content)
        with storage_errors("Writing", self._path):
            self._streams[name].write(content)
        self._ends[name] += values.numel()
        self._unwritten[name] -= values.numel()

    def write_checksums(self) -> None:
        assert not any(self._unwritten.values()), f"not all elements were written: {self._unwritten}"
        values = [value for checksums in self._checksums.values() for value in checksums.values()]
        if values:
            self._of_checksums.write(np.array(values, np.int64))
