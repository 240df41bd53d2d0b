"""DeepSpeed's ``async_io`` op for the comparison with stock: its own C++ I/O code under a thin layer of ours.

``torch.utils.cpp_extension`` takes minutes for the op's pybind11 layer, while the code below it compiles in seconds.
This module replaces that layer: one operation per call, and ``wait`` returns how many were pending.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.helpers.waiting import PROCESS_LIMIT

_SOURCES = Path(__file__).parent / "native"
_ALIGNMENT = 4096


@functools.cache
def library() -> ctypes.CDLL:
    """Compile and load DeepSpeed's files and the glue."""
    import deepspeed

    theirs = Path(deepspeed.__file__).parent / "ops" / "csrc" / "aio" / "common"
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(prefix="stock-async-io-") as folder:
        target = Path(folder) / "async_io.so"
        subprocess.run(
            [
                *(compiler, "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{_SOURCES}", f"-I{theirs}", "-o", str(target)),
                *(str(path) for path in (_SOURCES / "glue.cpp", *sorted(theirs.glob("*.cpp")))),
            ],
            check=True,
            timeout=PROCESS_LIMIT,
        )
        loaded = ctypes.CDLL(str(target))
    loaded.transfer.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64] + [
        ctypes.c_int
    ] * 4
    return loaded


class AioHandle:
    """A replacement for ``async_io.aio_handle``. ``bytes_moved`` counts the bytes of all handles."""

    bytes_moved = 0
    _pinned: ClassVar[set[int]] = set()  # addresses of the allocated storages

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._settings = (block_size, queue_depth, int(single_submit), int(overlap_events))
        self._parallelism = intra_op_parallelism
        self._pending = 0

    def get_alignment(self) -> int:
        return self._parallelism * _ALIGNMENT

    def get_intra_op_parallelism(self) -> int:
        return self._parallelism

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
        return self._run(buffer, path, offset, read=True)

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
        return self._run(buffer, path, offset, read=False)

    def wait(self) -> int:
        done, self._pending = self._pending, 0
        return done

    def new_cpu_locked_tensor(self, numel: int, example: torch.Tensor) -> torch.Tensor:
        nbytes = numel * example.element_size()
        raw = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
        aligned = raw[-raw.data_ptr() % _ALIGNMENT :][:nbytes].view(example.dtype)
        self._pinned.add(aligned.untyped_storage().data_ptr())
        return aligned

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        self._pinned.discard(tensor.untyped_storage().data_ptr())
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _run(self, buffer: torch.Tensor, path: str, offset: int, *, read: bool) -> int:
        nbytes = buffer.numel() * buffer.element_size()
        # Memory that direct I/O cannot use goes through a bounce buffer, as in cpu_op_desc_t.
        memory = buffer
        if buffer.data_ptr() % 512:
            memory = self.new_cpu_locked_tensor(buffer.numel(), buffer)
            memory.copy_(buffer.view(memory.shape))
        result: int = library().transfer(path.encode(), memory.data_ptr(), nbytes, int(read), offset, *self._settings)
        if memory is not buffer and read:
            buffer.view(memory.shape).copy_(memory)
        self._pending += result == 0
        type(self).bytes_moved += nbytes
        return result


def install(handle: type[AioHandle] = AioHandle) -> Any:
    """Make DeepSpeed's swappers use this op instead of compiling their own."""
    library()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder.load = lambda self, verbose=True: SimpleNamespace(aio_handle=handle)  # type: ignore[method-assign]
    AsyncIOBuilder.is_compatible = lambda self, verbose=False: True  # type: ignore[method-assign]
    return handle
