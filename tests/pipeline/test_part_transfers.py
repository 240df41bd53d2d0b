"""Tensors between storage and host memory: every byte in its place, or an error."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.errors import StorageCorruptError, StorageError, StorageFullError, StorageTimeoutError
from lightning_smartinfinity.native import IoClass, MemoryPool
from lightning_smartinfinity.pipeline.layout.tensors import lent_tensor
from lightning_smartinfinity.pipeline.state import part_transfers
from lightning_smartinfinity.pipeline.state.part_transfers import PartTransfers
from lightning_smartinfinity.planning import needs
from lightning_smartinfinity.storage import StoredTensor, TensorStore
from lightning_smartinfinity.storage.io.scheduling import io_waits, scheduler_of
from tests.helpers.native_testing import Hold, inject
from tests.helpers.unnamed import unnamed_files
from tests.helpers.waiting import await_that, lenient
from tests.native.test_deadlines import interrupted

BLOCK = 4096
# Two of the small buffers and a part of a block.
LARGE = (2 << 20) + 5000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    store = TensorStore([tmp_path / "a", tmp_path / "b"], job="default", direct_io="auto")
    yield store
    store.close()


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(parts: PartTransfers, stored: StoredTensor, numel: int) -> torch.Tensor:
    """Return the first bytes of a parameter."""
    values = torch.empty(numel, dtype=torch.uint8)
    parts.get(stored, 0, values)
    parts.synchronize()
    return values


def test_a_plan_counts_what_is_in_flight(store: TensorStore) -> None:
    """Memory for parts of many lengths is never more than a plan counts, and nearly all of it is needed.

    The number of parts in flight is bounded, too.
    """
    parts, random_ = PartTransfers(store), random.Random(0)
    seen = [0]
    for numel in (24 << 20, *(200 * [BLOCK]), *(random_.choice([5_000, 300_000, 999_000, 3 << 20]) for _ in range(60))):
        parts.put(store.add(numel), 0, torch.zeros(numel, dtype=torch.uint8))
        seen.append(parts.nbytes)
        assert len(parts._in_flight) <= part_transfers._REQUESTS_IN_FLIGHT
    parts.synchronize()
    assert 0.6 * needs._TRANSFER_BYTES < max(seen) <= needs._TRANSFER_BYTES


@pytest.mark.parametrize("seed", range(6))
def test_parts_in_any_order(store: TensorStore, seed: int) -> None:
    """Writing and reading random parts of several parameters gives the bytes of plain tensors."""
    choose, parts = random.Random(seed), PartTransfers(store)
    inject(store.core, seed=seed, max_delay_us=50, short_transfer_every=choose.choice([0, 3]))
    plain = [noise(numel, seed) for numel in (LARGE, 3 * BLOCK, 2 * BLOCK + 10, 7)]
    stored = [store.add(tensor.numel()) for tensor in plain]
    for parameter, tensor in zip(stored, plain, strict=True):
        parts.put(parameter, 0, tensor)
    got: list[tuple[torch.Tensor, torch.Tensor]] = []
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
            got.append((values, whole[begin:end].clone()))
        if choose.random() < 0.2:
            parts.synchronize()
            assert all(torch.equal(values, expected) for values, expected in got)
    parts.synchronize()
    for parameter, tensor in zip(stored, plain, strict=True):
        assert torch.equal(read(parts, parameter, tensor.numel()), tensor)


def test_consecutive_parts_read_nothing(store: TensorStore) -> None:
    """Writing a parameter from end to end in odd pieces reads nothing and writes each block once."""
    parts, parameter, values = PartTransfers(store), store.add(LARGE), noise(LARGE, 0)
    for begin in range(0, LARGE, 77_777):
        parts.put(parameter, begin, values[begin : begin + 77_777])
    parts.synchronize()
    counters = store.counters()
    assert (counters.read_bytes, counters.written_bytes) == (0, -(-LARGE // BLOCK) * BLOCK)


@pytest.mark.parametrize(
    ("faults", "error", "doing"),
    [
        ({"fail_write_at": 1}, StorageError, "writing"),
        ({"fail_write_at": 0, "errno": errno.ENOSPC}, StorageFullError, "writing"),
        ({"fail_read_at": 0}, StorageError, "reading"),
    ],
)
def test_a_transfer_that_fails(
    store: TensorStore, faults: dict[str, int], error: type[StorageError], doing: str
) -> None:
    """It raises with the file's name when it is waited for, leaves nothing in flight, and can be repeated."""
    parts, parameter, values = PartTransfers(store), store.add(LARGE), noise(LARGE, 0)
    inject(store.core, **faults)
    parts.put(parameter, 0, values)
    with pytest.raises(error, match=rf"Parameters: {doing} .*unnamed file"):
        read(parts, parameter, LARGE)
    assert not parts._in_flight
    parts.put(parameter, 0, values)
    assert torch.equal(read(parts, parameter, LARGE), values)


def test_an_interrupted_wait_keeps_memory_and_order(store: TensorStore) -> None:
    """After an interrupted wait, the memory in use is not lent, and a read returns what was being written."""
    pool, parameter, values = MemoryPool(), store.add(64 * BLOCK), noise(64 * BLOCK, 0)
    pool.limit = 1 << 20
    memory = lent_tensor(pool, values.numel())
    memory.copy_(values)
    inject(store.core, seed=1, max_delay_us=200_000, short_transfer_every=1)
    ticket = store.write(parameter, memory)
    with interrupted():
        store.finish(ticket)
    del memory
    found = lent_tensor(pool, values.numel())
    found.zero_()
    store.finish(store.read(parameter, found))
    assert torch.equal(found, values)
    del found
    store.finish(store.read(parameter, lent_tensor(pool, values.numel())))
    assert pool.lent_bytes == 0


def test_an_interrupt_behind_the_start_of_a_read(store: TensorStore) -> None:
    """Memory that a read still fills is not lent to others, although nobody has its ticket."""
    pool, parameter, hold = MemoryPool(), store.add(BLOCK), Hold(store.core, read_at=0)

    def interrupted_read(*place: Any, **settings: Any) -> int:
        ticket = store.core.read(*place, **settings)
        for _ in iter(ctypes.pythonapi.PyErr_SetInterrupt, None):  # the interpreter looks for signals behind calls only
            return ticket
        raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        store._start(partial(interrupted_read), parameter, lent_tensor(pool, BLOCK), 0, IoClass.AWAITED)
    gc.collect()
    assert pool.lent_bytes == BLOCK
    hold.release()
    await_that(lambda: store.release_ended() or pool.lent_bytes == 0)


def test_another_thread_is_faster(store: TensorStore) -> None:
    """Several threads may release memory of transfers that have ended, as backward frees tensors in its own thread."""

    class Released(dict[int, Any]):
        def __iter__(self) -> Iterator[int]:
            tickets = super().__iter__()
            self.clear()
            return tickets

    pool = MemoryPool()
    store.core.wait(store.read(store.add(BLOCK), lent_tensor(pool, BLOCK)))
    store._unfinished = Released(store._unfinished)
    assert pool.lent_bytes == BLOCK
    store.release_ended()
    assert pool.lent_bytes == 0


def test_memory_of_a_read_that_is_not_answered(tmp_path: Path) -> None:
    """It is not lent again while the disk may still write to it, however often the read is finished."""
    store = TensorStore([tmp_path], job="default", direct_io="auto", io_timeout=lenient(0.2))
    pool, parameter = MemoryPool(), store.add(BLOCK)
    hold = Hold(store.core, read_at=0)
    ticket = store.read(parameter, lent_tensor(pool, BLOCK))
    with pytest.raises(StorageTimeoutError, match="did not return within"):
        store.finish(ticket)
    store.finish(ticket)
    gc.collect()
    assert pool.lent_bytes == BLOCK
    hold.release()
    store.close()


def test_parts_after_an_interrupt(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt, buffers that are still being written are not filled again."""
    monkeypatch.setattr(part_transfers, "_BYTES_IN_FLIGHT", 4 << 20)
    parts, values = PartTransfers(store), noise(5 << 20, 0)
    first, second = store.add(values.numel()), store.add(1 << 20)
    inject(store.core, seed=1, max_delay_us=40_000, short_transfer_every=1)
    parts.put(first, 0, values[: 4 << 20])
    with interrupted():
        parts.put(first, 4 << 20, values[4 << 20 :])  # put() waits for the first buffer
    parts.put(second, 0, torch.ones(1 << 20, dtype=torch.uint8))
    parts.synchronize()
    inject(store.core)
    assert torch.equal(read(parts, first, 4 << 20), values[: 4 << 20])


def test_parameters_are_dealt_to_the_emptiest_folder(store: TensorStore) -> None:
    """A large parameter goes to one folder and the small ones to the other."""
    stored = [store.add(nbytes) for nbytes in (9 * BLOCK, 1, 2 * BLOCK, BLOCK)]
    assert [tensor.extent.offset // BLOCK for tensor in stored] == [0, 0, 1, 3]
    assert len({tensor.extent.path for tensor in stored}) == 2
    assert [tensor.extent.path == stored[0].extent.path for tensor in stored] == [True, False, False, False]
    assert store.storage_bytes == 13 * BLOCK


def test_files_of_one_device_share_a_scheduler(tmp_path: Path) -> None:
    """All stores of a process that use one device take turns, and it is told who waited for whom."""
    stores = [TensorStore([tmp_path / name], job=name, direct_io="auto", io_engine="threads") for name in ("a", "b")]
    folder = os.open(tmp_path, os.O_RDONLY)
    assert scheduler_of(folder) is scheduler_of(folder)
    os.close(folder)
    tensors = [store.add(1 << 20) for store in stores]
    pool, before = MemoryPool(), behind_background()
    hold = Hold(stores[0].core, write_at=0, count=64)
    memory = lent_tensor(pool, 1 << 20).zero_()
    tickets = [stores[0].write(tensors[0], memory[: 1 << 20], io_class=IoClass.BACKGROUND)]
    tickets += [stores[0].write(stores[0].add(1 << 20), memory, io_class=IoClass.BACKGROUND) for _ in range(63)]
    urgent = stores[1].write(tensors[1], memory)
    assert not stores[1].done(urgent)
    hold.release()
    stores[1].finish(urgent)
    for ticket in tickets:
        stores[0].finish(ticket)
    assert behind_background() > before
    for store in stores:
        store.close()


def behind_background() -> int:
    """Return how many awaited requests of this process have waited for background ones."""
    return sum(wait.requests for wait in io_waits() if (wait.waiting, wait.other) == ("awaited", "background"))


def test_what_is_not_what_was_written_is_refused(store: TensorStore) -> None:
    """A parameter that storage changed is never used: the error names the file, the offset and what to do.

    This holds also for the rest of a block of which a part is written.
    """
    parts, parameter, values = PartTransfers(store), store.add(LARGE), noise(LARGE, 0)
    parts.put(parameter, 0, values)
    parts.synchronize()
    offset = parameter.extent.offset + BLOCK
    with unnamed_files(Path(parameter.extent.path).parent)[0].open("r+b") as file:
        file.seek(offset)
        file.write(values[:BLOCK].numpy().tobytes())
    parts.get(parameter, 2 * BLOCK, torch.empty(BLOCK, dtype=torch.uint8))
    parts.synchronize()
    parts.put(parameter, BLOCK + 10, noise(10, 2))
    with pytest.raises(StorageCorruptError, match=rf"block at offset {offset} of .*unnamed file\) does not hold"):
        parts.synchronize()
    with pytest.raises(StorageCorruptError, match="resume from a checkpoint"):
        read(parts, parameter, LARGE)
    parts.put(parameter, 0, values)
    assert torch.equal(read(parts, parameter, LARGE), values)
