"""Writes safetensors files window by window.

The format is the length of the header in eight bytes, the header in JSON, padded with spaces to a multiple of eight
bytes, and the elements. The safetensors library writes whole tensors from memory, and a single embedding may have 4 GB,
so this module writes the files itself. They have the same bytes as the library's.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.export.checksums import HEADER, Part
from lightning_smartinfinity.storage.io.files import OpenFile, limited
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import PartChecksums
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import TensorSpec

__all__ = ["SafetensorsFile"]

_ALIGNMENT = 8
_UNFLUSHED_BYTES = 64 * 1024 * 1024
_FEW_BYTES = 1 << 20  # a thread would take longer
# In the library's order: a file begins with tensors of the last dtype.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}


class SafetensorsFile:
    """A new safetensors file, whose space is allocated at once.

    Args:
        path: Path of the file, which does not exist.
        tensors: Shape and dtype of every tensor by name.

    Raises:
        OSError: The file cannot be created, or the disk is full.
        StorageTimeoutError: The disk does not answer.
        UnsupportedError: The format does not have the dtype of a tensor.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorSpec]) -> None:
        self._tensors = tensors
        self._unwritten = {name: spec.nbytes for name, spec in tensors.items()}
        header, offsets = _layout(tensors)
        self._offsets = {HEADER: 0, **offsets}
        sizes = {HEADER: len(header), **self._unwritten}
        self._checksums = {name: PartChecksums(nbytes) for name, nbytes in sizes.items()}
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file = OpenFile(path, flags, doing="Creating", cached_bytes=_UNFLUSHED_BYTES)
        try:
            total = sum(sizes.values())
            limited(f"Allocating {total} bytes for", path, os.posix_fallocate, self._file.descriptor, 0, total)
            self._write(HEADER, 0, np.frombuffer(header, np.uint8))
        except BaseException:
            self.close_incomplete()
            raise

    def write(self, name: str, begin: int, values: torch.Tensor) -> None:
        """Write consecutive elements of a tensor. Write each element once, in any order.

        Args:
            name: Name of the tensor.
            begin: Index of the first element in the flat tensor.
            values: Elements in host memory and in the tensor's dtype.

        Raises:
            OSError: They could not be written.
        """
        assert values.dtype == self._tensors[name].dtype
        content = values.contiguous().flatten().view(torch.uint8).numpy()
        self._write(name, begin * values.element_size(), content)
        self._unwritten[name] -= content.nbytes

    def _write(self, part: str, begin: int, content: NDArray[np.uint8]) -> None:
        with _meanwhile(partial(self._checksums[part].add, begin, content), nbytes=content.nbytes):
            self._file.write_all(content.data, self._offsets[part] + begin)

    def parts(self) -> dict[str, Part]:
        """Return the parts of the file, which must be complete: its header, and its tensors by name."""
        return {
            name: Part(self._offsets[name], checksums.nbytes, checksums.values())
            for name, checksums in self._checksums.items()
        }

    def close(self) -> None:
        """Flush and close the file, which must be complete."""
        assert not any(self._unwritten.values()), f"not all elements were written: {self._unwritten}"
        self._file.flush()
        self.close_incomplete()

    def close_incomplete(self) -> None:
        """Close the file, complete or not; idempotent."""
        self._file.close()


@contextmanager
def _meanwhile(compute: Callable[[], None], *, nbytes: int) -> Iterator[None]:
    """Compute something of these bytes while the body waits for the disk; before it, if they are few."""
    thread = Thread(target=compute, name="smart-infinity-checksums", daemon=True)
    try:
        if nbytes < _FEW_BYTES:
            compute()
        else:
            thread.start()
    except RuntimeError:  # no thread can be started
        compute()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


def _layout(tensors: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the elements, and the offset of every tensor in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name in sorted(sorted(tensors), key=lambda name: _rank(name, tensors[name].dtype), reverse=True):
        spec = tensors[name]
        begins[name], end = end, end + spec.nbytes
        entries[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _rank(name: str, dtype: torch.dtype) -> int:
    if dtype not in _DTYPES:
        raise UnsupportedError(
            f"{name!r} is of {dtype}, which the safetensors format cannot hold.",
            "Export --to lightning, or keep the tensor in another dtype.",
        )
    return list(_DTYPES).index(dtype)
