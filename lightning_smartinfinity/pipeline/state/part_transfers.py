"""Transfers parts of stored tensors to and from any host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.layout.tensors import lent_tensor
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks
from lightning_smartinfinity.storage.tensors.tensor_store import StoredTensor, TensorStore

__all__ = ["PartTransfers"]

_PART_BYTES = 1 << 20
# During an update, a request waits for all requests in flight before it. Many at once are needed to keep up.
_BYTES_IN_FLIGHT = 8 << 20
_REQUESTS_IN_FLIGHT = 64
_POOL_BYTES = 12 << 20


class _InFlight(NamedTuple):
    """A transfer, its buffer, and the function to call after it."""

    ticket: int
    buffer: torch.Tensor
    then: Callable[[], object]


class PartTransfers:
    """Transfers any bytes of tensors to and from any host memory, through a few megabytes of its own.

    Storage is written in whole blocks. If a part ends inside a block, the block is held back, since the next part
    usually begins there. If the next part begins elsewhere, and at :meth:`synchronize`, the rest of the block is read
    from storage and the block is written.

    Args:
        store: The store of the tensors.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._pool = native.MemoryPool()
        self._pool.limit = _POOL_BYTES
        self._in_flight: deque[_InFlight] = deque()
        self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        # The block held back: its tensor, its offset, and the begin and end of its bytes in memory.
        self._held: tuple[StoredTensor, int, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Host memory of all buffers."""
        return self._pool.nbytes + self._block.nbytes

    def put(self, stored: StoredTensor, begin: int, values: torch.Tensor) -> None:
        """Start writing ``values`` (uint8, which may change on return) at byte ``begin``.

        Raises:
            StorageError: This or an earlier transfer failed.
        """
        if self._held is not None and (stored, begin) != (self._held[0], self._held[1] + self._held[3]):
            self._write_held()  # the new values may overlap it
        while values.numel():
            inside = begin % BLOCK_BYTES
            numel = values.numel()
            if inside or numel < BLOCK_BYTES:
                count = min(BLOCK_BYTES - inside, numel)
                self._hold(stored, begin - inside, inside, values[:count])
            else:
                count = min(numel // BLOCK_BYTES * BLOCK_BYTES, _PART_BYTES)
                buffer = self._next_buffer(count)
                _copy(values[:count], buffer)
                self._start(self._write(stored, buffer, begin), buffer)
            begin, values = begin + count, values[count:]

    def get(self, stored: StoredTensor, begin: int, values: torch.Tensor) -> None:
        """Start reading from byte ``begin`` into ``values`` (uint8), which is filled after :meth:`synchronize`.

        Raises:
            StorageError: This or an earlier transfer failed.
        """
        self._write_held()
        while values.numel():
            inside = begin % BLOCK_BYTES
            count = min(values.numel(), _PART_BYTES - inside)
            buffer = self._next_buffer(inside + count)
            ticket = self._store.read(stored, buffer, offset=begin - inside, io_class=native.IoClass.STATE)
            self._start(ticket, buffer, partial(_copy, buffer[inside : inside + count], values))
            begin, values = begin + count, values[count:]

    def synchronize(self) -> None:
        """Wait until all transfers started so far have completed.

        Raises:
            StorageError: A transfer failed; none is in flight any more.
        """
        try:
            self._write_held()
            while self._in_flight:
                self._finish_first()
        except BaseException:
            self._finish_all_quietly()
            raise

    def _write(self, stored: StoredTensor, memory: torch.Tensor, offset: int) -> int:
        return self._store.write(stored, memory, offset=offset, io_class=native.IoClass.WRITE_BEHIND)

    def _start(self, ticket: int, buffer: torch.Tensor, then: Callable[[], object] = lambda: None) -> None:
        self._in_flight.append(_InFlight(ticket, buffer, then))

    def _next_buffer(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of whole blocks for ``nbytes``, after waiting until few enough transfers are in flight."""
        while self._in_flight and (
            len(self._in_flight) >= _REQUESTS_IN_FLIGHT
            or sum(each.buffer.nbytes for each in self._in_flight) + nbytes > _BYTES_IN_FLIGHT
        ):
            self._finish_first()
        return lent_tensor(self._pool, whole_blocks(nbytes))

    def _finish_first(self) -> None:
        first = self._in_flight[0]
        try:
            self._store.finish(first.ticket)
        except StorageError:
            self._in_flight.popleft()
            raise
        # Not in a finally clause: after an interrupt the transfer stays queued, because it still uses its buffer.
        self._in_flight.popleft()
        first.then()

    def _hold(self, stored: StoredTensor, block: int, inside: int, values: torch.Tensor) -> None:
        if self._held is None:
            self._held = (stored, block, inside, inside)
        end = inside + values.numel()
        _copy(values, self._block[inside:])
        self._held = (stored, block, self._held[2], end)
        if end == BLOCK_BYTES or block + end == stored.nbytes:
            self._write_held()

    def _write_held(self) -> None:
        if self._held is None:
            return
        stored, block, first, end = self._held
        self._held = None
        buffer = self._next_buffer(BLOCK_BYTES)
        if first > 0 or (end < BLOCK_BYTES and block + end < stored.nbytes):
            self._start(self._store.read(stored, buffer, offset=block), buffer)
            while self._in_flight:
                self._finish_first()
        _copy(self._block[first:end], buffer[first:])
        self._start(self._write(stored, buffer, block), buffer)

    def _finish_all_quietly(self) -> None:
        self._held = None
        while self._in_flight:
            with suppress(StorageError):
                self._finish_first()


def _copy(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy ``values`` to the begin of ``target``, both uint8, with numpy, since torch would start more threads."""
    target[: values.numel()].numpy()[:] = values.numpy()
