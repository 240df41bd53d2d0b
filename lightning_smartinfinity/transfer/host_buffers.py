"""Host buffers for direct I/O, lent as tensors and reused when nothing refers to them any more."""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.store.parameter_files import whole_blocks

__all__ = ["HostMemory"]


class HostMemory:
    """A pool of block-aligned buffers, by size.

    A buffer comes back when the last tensor over it is gone, views that autograd saved included: memory that is still
    in use is never overwritten.

    Attributes:
        limit: Bytes of all buffers above which idle ones are unmapped.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._idle: defaultdict[int, list[native.HostBuffer]] = defaultdict(list)
        self._idle_bytes = 0
        self._used_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use and idle."""
        return self._used_bytes + self._idle_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of whole blocks as a 1-D uint8 tensor with arbitrary content."""
        size = whole_blocks(nbytes)
        if self._idle[size]:
            self._idle_bytes -= size
            buffer = self._idle[size].pop()
        else:
            if self.nbytes + size > self.limit:
                self.trim()
            buffer = native.HostBuffer(size)
        self._used_bytes += size
        # The tensor's storage keeps this array alive, and the array keeps the buffer alive.
        array = np.frombuffer(buffer.memoryview(), np.uint8)
        weakref.finalize(array, self._reclaim, buffer).atexit = False
        return torch.from_numpy(array)

    def trim(self) -> None:
        """Unmap all idle buffers."""
        self._idle.clear()
        self._idle_bytes = 0

    def _reclaim(self, buffer: native.HostBuffer) -> None:
        self._used_bytes -= buffer.nbytes
        if self.nbytes + buffer.nbytes <= self.limit:
            self._idle_bytes += buffer.nbytes
            self._idle[buffer.nbytes].append(buffer)
