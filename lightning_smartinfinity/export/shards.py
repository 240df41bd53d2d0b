"""Writes an export's tensors to one safetensors file, or to several with an index, and their checksums."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from lightning_smartinfinity.export.checksums import HEADER, Part, write_checksums
from lightning_smartinfinity.export.safetensors_file import SafetensorsFile
from lightning_smartinfinity.settings.rules import in_bytes, num_bytes
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import checksums_of
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import TensorSpec

__all__ = ["SHARD_SIZE", "Shards", "writing_shards"]

_WEIGHTS = "model{suffix}.safetensors"
_INDEX = "model.safetensors.index.json"


SHARD_SIZE = replace(num_bytes(1), kept=lambda size: size)
"""Rule for the largest size of a file. The value stays as the user wrote it, for messages."""


class Shards:
    """Open safetensors files, each with a part of the tensors."""

    def __init__(self, folder: Path, files: Mapping[str, list[str]], tensors: Mapping[str, TensorSpec]) -> None:
        self._folder = folder
        self._tensors = tensors
        self._file_names = {name: file for file, names in files.items() for name in names}
        self._opened: dict[str, SafetensorsFile] = {}
        try:
            for file, names in files.items():
                with storage_errors("Creating", folder / file):
                    self._opened[file] = SafetensorsFile(folder / file, {name: tensors[name] for name in names})
        except BaseException:
            self.close_incomplete()
            raise

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        """Write elements of a tensor; see :meth:`SafetensorsFile.write`."""
        file = self._file_names[name]
        with storage_errors("Writing", self._folder / file):
            self._opened[file].write(name, begin, values)

    def close(self) -> None:
        """Flush and close all files; write the index if there are several, and the checksums."""
        for name, file in self._opened.items():
            with storage_errors("Writing", self._folder / name):
                file.close()
        parts = {name: file.parts() for name, file in self._opened.items()}
        if len(self._opened) > 1:
            index = (json.dumps(self._index(), indent=2, sort_keys=True) + "\n").encode()
            (self._folder / _INDEX).write_bytes(index)
            parts[_INDEX] = {HEADER: Part(0, len(index), checksums_of(index))}
        write_checksums(self._folder, parts)

    def close_incomplete(self) -> None:
        """Close all files, complete or not; idempotent."""
        for file in self._opened.values():
            file.close_incomplete()

    def _index(self) -> dict[str, object]:
        metadata = {"total_size": sum(spec.nbytes for spec in self._tensors.values())}
        return {"metadata": metadata, "weight_map": self._file_names}


@contextmanager
def writing_shards(
    folder: Path, tensors: Mapping[str, TensorSpec], *, max_shard_size: int | str | None
) -> Iterator[Shards]:
    """Create files for these tensors in a folder, which are complete when the context ends without an error.

    Args:
        folder: The folder.
        tensors: Shape and dtype by name.
        max_shard_size: Bytes of a file, or text such as ``"5GB"``; None for one file.
    """
    with ExitStack() as cleanup:
        shards = Shards(folder, _split(tensors, max_shard_size), tensors)
        cleanup.callback(shards.close_incomplete)
        yield shards
        shards.close()


def _split(tensors: Mapping[str, TensorSpec], max_shard_size: int | str | None) -> dict[str, list[str]]:
    if max_shard_size is None or not tensors:
        return {_WEIGHTS.format(suffix=""): list(tensors)}
    shard_bytes = in_bytes(max_shard_size)
    assert shard_bytes, f"{max_shard_size!r} is checked before anything is written"
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda spec: spec.nbytes,
        filename_pattern=_WEIGHTS,
        max_shard_size=shard_bytes,
    )
    return {file: names for file, names in split.filename_to_tensors.items() if names}
