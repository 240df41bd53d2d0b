"""Parameters between storage and host memory: every byte in its place, in memory of a fixed size."""

from __future__ import annotations

import errno
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.transfer.host_buffers import HostMemory
from lightning_smartinfinity.transfer.parameter_store import ParameterStore, StoredParameter
from lightning_smartinfinity.transfer.part_transfers import PartTransfers
from tests.helpers.native_testing import inject
from tests.native.test_interrupt import interrupted

BLOCK = 4096
# Two of the small buffers and a part of a block.
LARGE = (2 << 20) + 5000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ParameterStore]:
    store = ParameterStore([tmp_path / "a", tmp_path / "b"], job="default", rank=0, direct_io="auto")
    yield store
    store.close()


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class LateReads(ParameterStore):
    """A store whose reads start only when they are waited for, so that later writes overtake them."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder], job="default", rank=0, direct_io="auto")
        self.late: dict[int, tuple[StoredParameter, torch.Tensor, int]] = {}

    def read(self, stored: StoredParameter, memory: torch.Tensor, *, offset: int = 0) -> int:
        number = -1 - len(self.late)
        self.late[number] = (stored, memory, offset)
        return number

    def finish(self, ticket: int) -> None:
        if ticket in self.late:
            stored, memory, offset = self.late[ticket]
            ticket = super().read(stored, memory, offset=offset)
        super().finish(ticket)


@pytest.mark.parametrize(("direct_io", "engine"), [("on", "io_uring"), ("off", "plain")])
def test_engine(tmp_path: Path, direct_io: str, engine: str) -> None:
    """Direct I/O uses io_uring. Files in the page cache use the plain engine, which frees their pages."""
    store = ParameterStore([tmp_path], job="default", rank=0, direct_io=direct_io)
    assert store.queue.io_engine == engine
    store.close()


@pytest.mark.parametrize("begin", [0, BLOCK, 10])
def test_a_read_is_not_overtaken_by_a_write(tmp_path: Path, begin: int) -> None:
    """A read returns the values from before a later write."""
    store = LateReads(tmp_path)
    parts = PartTransfers(store)
    stored, old = store.add(3 * BLOCK), noise(3 * BLOCK, 0)
    parts.put(stored, 0, old)
    parts.synchronize()
    values = torch.empty(3 * BLOCK, dtype=torch.uint8)
    parts.get(stored, 0, values)
    parts.put(stored, begin, noise(BLOCK, 1))
    parts.synchronize()
    assert torch.equal(values, old)
    store.close()


@pytest.mark.parametrize("seed", range(6))
def test_parts_in_any_order(store: ParameterStore, seed: int) -> None:
    """Writing and reading random parts of several parameters gives the bytes of plain tensors."""
    choose, parts = random.Random(seed), PartTransfers(store)
    inject(store.queue, seed=seed, max_delay_us=50, short_transfer_every=choose.choice([0, 3]))
    plain = [noise(numel, seed) for numel in (LARGE, 3 * BLOCK, 2 * BLOCK + 10, 7)]
    stored = [store.add(tensor.numel()) for tensor in plain]
    for parameter, tensor in zip(stored, plain, strict=True):
        parts.put(parameter, 0, tensor)
    read: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(60):
        index = choose.randrange(len(plain))
        whole = plain[index]
        begin = choose.choice([0, choose.randrange(whole.numel()), choose.randrange(whole.numel()) // BLOCK * BLOCK])
        end = choose.choice([whole.numel(), choose.randint(begin, min(whole.numel(), begin + 9000))])
        if choose.random() < 0.6:
            whole[begin:end] = noise(end - begin, number)
            source = whole[begin:end].clone()
            parts.put(stored[index], begin, source)
            source.zero_()  # put() has copied it
        else:
            values = torch.empty(end - begin, dtype=torch.uint8)
            parts.get(stored[index], begin, values)
            read.append((values, whole[begin:end].clone()))
        if choose.random() < 0.2:
            parts.synchronize()
            assert all(torch.equal(values, expected) for values, expected in read)
    parts.synchronize()
    for parameter, tensor in zip(stored, plain, strict=True):
        values = torch.empty(tensor.numel(), dtype=torch.uint8)
        parts.get(parameter, 0, values)
        parts.synchronize()
        assert torch.equal(values, tensor)


def test_consecutive_parts_read_nothing(store: ParameterStore) -> None:
    """Writing a parameter from end to end in odd pieces reads nothing and writes each block once."""
    parts, parameter, values = PartTransfers(store), store.add(LARGE), noise(LARGE, 0)
    for begin in range(0, LARGE, 77_777):
        parts.put(parameter, begin, values[begin : begin + 77_777])
    parts.synchronize()
    traffic = store.traffic()
    assert traffic.shared_read_bytes == 0
    assert traffic.shared_write_bytes == -(-LARGE // BLOCK) * BLOCK


@pytest.mark.parametrize(
    ("faults", "error"),
    [({"fail_write_at": 1}, StorageError), ({"fail_write_at": 0, "errno": errno.ENOSPC}, StorageFullError)],
)
def test_a_write_that_fails(store: ParameterStore, faults: dict[str, int], error: type[StorageError]) -> None:
    """A failed write raises with the file's name, leaves nothing in flight, and can be repeated."""
    parts, parameter, values = PartTransfers(store), store.add(LARGE), noise(LARGE, 0)
    inject(store.queue, **faults)
    parts.put(parameter, 0, values)
    with pytest.raises(error, match=r"Parameters: writing .*parameters\.bin"):
        parts.synchronize()
    parts.synchronize()
    parts.put(parameter, 0, values)
    parts.synchronize()
    found = torch.empty(LARGE, dtype=torch.uint8)
    parts.get(parameter, 0, found)
    parts.synchronize()
    assert torch.equal(found, values)


def test_a_read_that_fails(store: ParameterStore) -> None:
    """A failed read raises with the file's name when it is waited for."""
    parts, parameter = PartTransfers(store), store.add(BLOCK)
    inject(store.queue, fail_read_at=0)
    parts.get(parameter, 0, torch.empty(BLOCK, dtype=torch.uint8))
    with pytest.raises(StorageError, match=r"Parameters: reading .*parameters\.bin"):
        parts.synchronize()


def test_an_interrupted_wait_keeps_memory_and_order(store: ParameterStore) -> None:
    """After an interrupted wait, the buffer in use is not handed out, and a read returns what was being written."""
    pool, parameter, values = HostMemory(), store.add(64 * BLOCK), noise(64 * BLOCK, 0)
    pool.limit = 1 << 20
    memory = pool.take(values.numel())
    memory.copy_(values)
    inject(store.queue, seed=1, max_delay_us=200_000, short_transfer_every=1)
    ticket = store.write(parameter, memory)
    with interrupted():
        store.finish(ticket)
    del memory
    found = pool.take(values.numel())
    found.zero_()
    store.finish(store.read(parameter, found))
    assert torch.equal(found, values)


def test_a_failure_after_an_interrupted_wait_is_raised_by_the_next_transfer(store: ParameterStore) -> None:
    """If the wait for a write was interrupted, its failure is raised by the next transfer."""
    parameter, memory = store.add(64 * BLOCK), HostMemory().take(64 * BLOCK)
    inject(store.queue, seed=1, max_delay_us=200_000, short_transfer_every=1, fail_write_at=3)
    ticket = store.write(parameter, memory)
    with interrupted():
        store.finish(ticket)
    with pytest.raises(StorageError, match=r"Parameters: writing .*parameters\.bin"):
        store.read(parameter, memory)
    store.finish(store.read(parameter, memory))


def test_parts_after_an_interrupt(store: ParameterStore) -> None:
    """After an interrupt, buffers that are still being written are not filled again."""
    parts, values = PartTransfers(store), noise(5 << 20, 0)
    first, second = store.add(values.numel()), store.add(1 << 20)
    inject(store.queue, seed=1, max_delay_us=200_000, short_transfer_every=1)
    parts.put(first, 0, values[: 4 << 20])
    with interrupted():
        parts.put(first, 4 << 20, values[4 << 20 :])  # put() waits for the first buffer
    parts.put(second, 0, torch.ones(1 << 20, dtype=torch.uint8))
    parts.synchronize()
    inject(store.queue)
    found = torch.empty(4 << 20, dtype=torch.uint8)
    parts.get(first, 0, found)
    parts.synchronize()
    assert torch.equal(found, values[: found.numel()])


def test_a_parameter_nobody_refers_to_gives_its_place_back(store: ParameterStore) -> None:
    """A parameter without references gives its place back, and the next one of its size takes it."""
    parameter = store.add(3 * BLOCK)
    place = parameter.place
    del parameter
    assert store.storage_bytes == 0
    assert store.add(3 * BLOCK).place == place


def test_memory_in_use_is_never_handed_out_again() -> None:
    """A view keeps its buffer in use. After the last view is gone the buffer is used again."""
    memory = HostMemory()
    memory.limit = 4 * BLOCK
    first = memory.take(BLOCK - 1)
    assert first.numel() == BLOCK and first.data_ptr() % BLOCK == 0
    address, view = first.data_ptr(), first.view(torch.bfloat16)[5:9]
    del first
    gc.collect()
    assert memory.take(BLOCK).data_ptr() != address
    del view
    assert memory.take(BLOCK).data_ptr() == address


def test_idle_memory_stays_within_the_limit() -> None:
    """Idle buffers of other sizes are freed to stay within the limit."""
    memory = HostMemory()
    memory.limit = 10 * BLOCK
    for blocks in (1, 2, 3, 4, 5, 6):
        memory.take(blocks * BLOCK)
        assert memory.nbytes <= memory.limit
    held = [memory.take(6 * BLOCK), memory.take(4 * BLOCK)]
    assert memory.nbytes == sum(tensor.numel() for tensor in held)
