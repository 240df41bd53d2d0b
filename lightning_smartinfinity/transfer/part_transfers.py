"""Transfers parts of tensors between storage and any host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.store.extents import BLOCK_BYTES
from lightning_smartinfinity.store.tensor_files import whole_blocks
from lightning_smartinfinity.store.tensor_store import StoredTensor, TensorStore

__all__ = ["PartTransfers"]

_PART_BYTES = 1 << 20
_NUM_PARTS = 4


class PartTransfers:
    """Transfers any bytes of tensors to and from any host memory, through a few buffers of a fixed size.

    Storage is written in whole blocks. If a part ends inside a block, that block is held back, since the next part
    usually begins there. Otherwise, and at :meth:`synchronize`, the rest of the block is read and it is written.

    Args:
        store: The store of the tensors.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        memory = native.HostBuffer(_NUM_PARTS * _PART_BYTES + BLOCK_BYTES)
        whole = torch.frombuffer(memory.memoryview(), dtype=torch.uint8)
        self._buffers = deque(whole[i * _PART_BYTES : (i + 1) * _PART_BYTES] for i in range(_NUM_PARTS))
        self._in_flight: deque[tuple[int, Callable[[], object]]] = deque()
        self._block = whole[_NUM_PARTS * _PART_BYTES :]
        # The block held back: its tensor, its offset, and the begin and end of its bytes in memory.
        self._held: tuple[StoredTensor, int, int, int] | None = None
        self.nbytes = memory.nbytes

    def put(self, stored: StoredTensor, begin: int, values: torch.Tensor) -> None:
        """Start writing ``values`` (uint8, which may change on return) at byte ``begin``.

        Raises:
            StorageError: This or an earlier transfer failed.
        """
        if self._held is not None and (stored, begin) != (self._held[0], self._held[1] + self._held[3]):
            self._write_held()  # what comes now may overlap it
        while values.numel():
            inside = begin % BLOCK_BYTES
            numel = values.numel()
            if inside or numel < BLOCK_BYTES:
                count = min(BLOCK_BYTES - inside, numel)
                self._hold(stored, begin - inside, inside, values[:count])
            else:
                count = min(numel // BLOCK_BYTES * BLOCK_BYTES, _PART_BYTES)
                buffer = self._next_buffer()
                _copy(values[:count], buffer)
                self._start(self._write(stored, buffer[:count], begin))
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
            buffer = self._next_buffer()
            memory = buffer[: whole_blocks(inside + count)]
            ticket = self._store.read(stored, memory, offset=begin - inside, io_class=native.IoClass.STATE)
            self._start(ticket, partial(_copy, buffer[inside : inside + count], values))
            begin, values = begin + count, values[count:]

    def synchronize(self) -> None:
        """Return when all transfers started so far have completed.

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

    def _start(self, ticket: int, then: Callable[[], object] = lambda: None) -> None:
        self._in_flight.append((ticket, then))

    def _next_buffer(self) -> torch.Tensor:
        if len(self._in_flight) == _NUM_PARTS:
            self._finish_first()
        self._buffers.rotate(-1)
        return self._buffers[-1]

    def _finish_first(self) -> None:
        ticket, then = self._in_flight[0]
        try:
            self._store.finish(ticket)
        except StorageError:
            self._in_flight.popleft()
            raise
        # After an interrupt it stays in the queue: the transfer still uses its buffer.
        self._in_flight.popleft()
        then()

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
        buffer = self._next_buffer()[:BLOCK_BYTES]
        if first > 0 or (end < BLOCK_BYTES and block + end < stored.nbytes):
            self._start(self._store.read(stored, buffer, offset=block))
            while self._in_flight:
                self._finish_first()
        _copy(self._block[first:end], buffer[first:])
        self._start(self._write(stored, buffer, block))

    def _finish_all_quietly(self) -> None:
        self._held = None
        while self._in_flight:
            with suppress(StorageError):
                self._finish_first()


def _copy(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy ``values`` to the begin of ``target``, both uint8, by this thread alone: torch would start more of them."""
    target[: values.numel()].numpy()[:] = values.numpy()
