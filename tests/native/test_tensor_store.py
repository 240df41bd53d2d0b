"""The tensor store of the core: places, checksums of what was written, order, classes, cancelling and lent memory."""

from __future__ import annotations

import errno
import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_smartinfinity.native import (
    Failure,
    IoClass,
    IoScheduler,
    MemoryLease,
    MemoryPool,
    StateFile,
    TensorExtent,
    TensorStore,
)
from tests.helpers.native_testing import Hold, Throttle, checking_thread, inject
from tests.helpers.waiting import await_that, join
from tests.native.builds import assert_in_fork, is_refused
from tests.native.test_deadlines import interrupted

BLOCK = 4096
PART = 4 << 20  # a request is cut into parts of this size
SMALL = 64 << 10  # the thread that completes a part of this size or less compares its checksums
STEP = 1 << 20  # the smallest step by which files grow

Bytes = NDArray[np.uint8]


class Setup:
    """A store over two files that share a scheduler, and a pool."""

    def __init__(self, folder: Path, *, in_flight_bytes: int = 64 << 20, verifies: bool = True) -> None:
        self.paths = [folder / "a", folder / "b"]
        self.scheduler = IoScheduler(in_flight_bytes=in_flight_bytes)
        for path in self.paths:
            path.touch()
        self.files = [StateFile(str(path), direct=False, scheduler=self.scheduler) for path in self.paths]
        self.store = TensorStore(self.files, verifies=verifies)
        self.pool = MemoryPool()

    def content(self, nbytes: int, seed: int | None = None) -> tuple[MemoryLease, Bytes]:
        lease = self.pool.take(nbytes)
        values = np.frombuffer(lease.memoryview(), np.uint8)
        values[:] = 7 if seed is None else np.random.default_rng(seed).integers(0, 256, lease.nbytes, np.uint8)
        return lease, values

    def write(
        self, extent: TensorExtent, memory: MemoryLease, *, offset: int = 0, io_class: IoClass = IoClass.AWAITED
    ) -> int:
        return self.store.write(extent, offset=offset, address=memory.address, nbytes=memory.nbytes, io_class=io_class)

    def read(
        self, extent: TensorExtent, memory: MemoryLease, *, offset: int = 0, io_class: IoClass = IoClass.AWAITED
    ) -> int:
        return self.store.read(extent, offset=offset, address=memory.address, nbytes=memory.nbytes, io_class=io_class)

    def written(self, nbytes: int, seed: int) -> tuple[TensorExtent, Bytes]:
        extent, (memory, values) = self.store.allocate(nbytes), self.content(nbytes, seed)
        assert self.store.wait(self.write(extent, memory)) is None
        return extent, values.copy()

    def found(self, extent: TensorExtent) -> Bytes | Failure:
        memory, values = self.content(extent.nbytes)
        failure = self.store.wait(self.read(extent, memory))
        return values.copy() if failure is None else failure

    def change(self, extent: TensorExtent, offset: int, content: bytes) -> None:
        with Path(extent.path).open("r+b") as file:
            file.seek(extent.offset + offset)
            file.write(content)


@pytest.fixture
def setup(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Setup]:
    """The store of a test, with the settings by which the test is parametrized."""
    setup = Setup(tmp_path, **getattr(request, "param", {}))
    yield setup
    setup.store.close()


@pytest.mark.parametrize(
    "setup", [{}, {"in_flight_bytes": BLOCK}], ids=["usual", "less than the tensor"], indirect=True
)
@pytest.mark.parametrize("faults", [{}, {"max_delay_us": 300, "short_transfer_every": 2, "seed": 5}], ids=["", "short"])
def test_what_is_written_is_read(setup: Setup, faults: dict[str, int]) -> None:
    """A tensor of several parts comes back whole, and parts of it by their offset. A ring's thread only submits."""
    inject(setup.store, **faults)
    extent, values = setup.written(2 * PART + SMALL + BLOCK, seed=1)
    np.testing.assert_array_equal(setup.found(extent), values)
    memory, part = setup.content(2 * BLOCK)
    assert setup.store.wait(setup.read(extent, memory, offset=PART - BLOCK)) is None
    np.testing.assert_array_equal(part, values[PART - BLOCK : PART + BLOCK])
    assert extent.generation == 1
    assert checking_thread(setup.store, extent, setup.content(extent.nbytes)[0].address) != "smart-inf-ring"


def test_what_was_never_written_is_zero(setup: Setup) -> None:
    """A place that was used before does not show its old content."""
    setup.written(3 * BLOCK, seed=1)
    gc.collect()
    assert setup.store.taken_bytes == 0
    np.testing.assert_array_equal(setup.found(setup.store.allocate(3 * BLOCK)), np.zeros(3 * BLOCK, np.uint8))


@pytest.mark.parametrize("damage", ["a flipped bit", "the content of another block", "its old content"])
@pytest.mark.parametrize("block", [0, 1, PART // BLOCK])
def test_a_block_that_changed(setup: Setup, block: int, damage: str) -> None:
    """A read of a block that changed on storage fails with its path and offset; other blocks are still read."""
    extent, old = setup.written(PART + BLOCK, seed=1)
    memory, values = setup.content(PART + BLOCK, seed=2)
    assert setup.store.wait(setup.write(extent, memory)) is None
    at, other = block * BLOCK, (block + 1) % (PART // BLOCK) * BLOCK
    content = {
        "a flipped bit": bytes([values[at] ^ 4]),
        "the content of another block": values[other : other + BLOCK].tobytes(),
        "its old content": old[at : at + BLOCK].tobytes(),
    }
    setup.change(extent, at, content[damage])
    failure = setup.found(extent)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.path, failure.offset) == ("checksum", extent.path, extent.offset + at)
    assert "generation 2" in failure.message and f"offset {failure.offset} of {extent.path}" in failure.message
    part_memory, part = setup.content(BLOCK)
    assert setup.store.wait(setup.read(extent, part_memory, offset=other)) is None
    np.testing.assert_array_equal(part, values[other : other + BLOCK])


@pytest.mark.parametrize(("setup", "verifies"), [({}, True), ({"verifies": False}, False)], indirect=["setup"])
def test_blocks_of_a_write_that_failed_are_not_read(setup: Setup, verifies: bool) -> None:
    """After a failed write its blocks cannot be read until they are written again.

    Without checksums, what storage changed is handed out.
    """
    extent, _ = setup.written(2 * BLOCK, seed=1)
    memory, values = setup.content(2 * BLOCK, seed=2)
    inject(setup.store, fail_write_at=0, errno=errno.ENOSPC)
    failure = setup.store.wait(setup.write(extent, memory))
    assert failure is not None and failure.errno == errno.ENOSPC
    later = setup.found(extent)
    assert isinstance(later, Failure) and later.kind == "generation"
    assert setup.store.wait(setup.write(extent, memory)) is None
    if not verifies:
        values[5] ^= 1
        setup.change(extent, 5, bytes([values[5]]))
    np.testing.assert_array_equal(setup.found(extent), values)


def test_requests_on_the_same_blocks_keep_their_order(setup: Setup) -> None:
    """A read waits for an earlier write of its blocks, and a write for an earlier read; others overtake them."""
    extent, old = setup.written(2 * BLOCK, seed=1)
    hold = Hold(setup.store, read_at=0)
    before, seen_before = setup.content(BLOCK)
    new, values = setup.content(BLOCK, seed=2)
    after, seen_after = setup.content(BLOCK)
    tickets = [setup.read(extent, before), setup.write(extent, new), setup.read(extent, after)]
    beside, seen_beside = setup.content(BLOCK)
    assert setup.store.wait(setup.read(extent, beside, offset=BLOCK)) is None
    assert hold.count == 1 and not any(setup.store.done(ticket) for ticket in tickets)
    assert Path(extent.path).read_bytes()[extent.offset :][: extent.nbytes] == old.tobytes()
    hold.release()
    assert [setup.store.wait(ticket) for ticket in tickets] == [None] * 3
    np.testing.assert_array_equal(seen_before, old[:BLOCK])
    np.testing.assert_array_equal(seen_after, values)
    np.testing.assert_array_equal(seen_beside, old[BLOCK:])


one_block_in_flight = pytest.mark.parametrize("setup", [{"in_flight_bytes": BLOCK}], indirect=True)


@one_block_in_flight
def test_a_write_that_has_not_started_can_be_cancelled(setup: Setup) -> None:
    """A cancelled write leaves the storage as it was, and what waits for it goes on; one that has started goes on."""
    extent, old = setup.written(BLOCK, seed=1)
    other = setup.store.allocate(BLOCK)
    hold = Hold(setup.store, write_at=0)
    first, second = setup.content(BLOCK, seed=2)[0], setup.content(BLOCK, seed=3)[0]
    started = setup.write(other, first)
    waiting = setup.write(extent, second)
    memory, values = setup.content(BLOCK)
    reading = setup.read(extent, memory)
    assert not setup.store.cancel(started)
    assert setup.store.cancel(waiting) and setup.store.done(waiting) and not setup.store.cancel(waiting)
    assert setup.store.wait(waiting) is None and not setup.store.done(started)
    hold.release()
    assert [setup.store.wait(ticket) for ticket in (started, reading)] == [None, None]
    np.testing.assert_array_equal(values, old)
    with pytest.raises(ValueError, match="no ticket"):
        setup.store.cancel(reading + 1)


@pytest.mark.parametrize("setup", [{"in_flight_bytes": 2 * BLOCK}], indirect=True)
def test_a_write_that_was_cut_short_is_not_cancelled(setup: Setup) -> None:
    """A write that waits for its second attempt has changed the storage, so it goes on to its end."""
    extent, _ = setup.written(2 * BLOCK, seed=1)
    inject(setup.store, short_transfer_every=1)
    first, second = Hold(setup.store, write_at=0), Hold(setup.store, write_at=1)
    (memory, values), before = setup.content(2 * BLOCK, seed=2), setup.store.counters().written_bytes
    cut_short = setup.write(extent, memory)
    other = setup.write(setup.store.allocate(2 * BLOCK), setup.content(2 * BLOCK)[0])
    first.release()
    await_that(lambda: second.count == 1 and setup.store.counters().written_bytes > before)
    assert not setup.store.cancel(cut_short)
    second.release()
    assert [setup.store.wait(ticket) for ticket in (cut_short, other)] == [None, None]
    np.testing.assert_array_equal(setup.found(extent), values)


@one_block_in_flight
def test_urgent_requests_go_first(setup: Setup) -> None:
    """Requests start in the order of their classes, and the scheduler tells who waited for whom."""
    extents = [setup.store.allocate(BLOCK) for _ in range(4)]
    memory, _ = setup.content(BLOCK, seed=1)
    hold = Hold(setup.store, write_at=0)
    classes = (IoClass.STATE, IoClass.BACKGROUND, IoClass.GATHER, IoClass.WRITE_BEHIND)
    tickets = [setup.write(extent, memory, io_class=c) for extent, c in zip(extents, classes, strict=True)]
    await_that(lambda: hold.count == 1)
    hold.release()
    setup.store.close()
    assert len(set(tickets)) == len(tickets)
    assert {(who, whom): (requests, nbytes) for who, whom, requests, nbytes, _ in setup.scheduler.waits()} == {
        ("gather", "state"): (1, BLOCK),
        ("write_behind", "state"): (1, BLOCK),
        ("write_behind", "gather"): (1, BLOCK),
        ("background", "state"): (1, BLOCK),
        ("background", "gather"): (1, BLOCK),
        ("background", "write_behind"): (1, BLOCK),
    }


@one_block_in_flight
def test_a_request_that_is_waited_for_becomes_urgent(setup: Setup) -> None:
    """A wait moves a request in front of others, also if Ctrl-C ends the wait."""
    extents = [setup.store.allocate(BLOCK) for _ in range(3)]
    memory, values = setup.content(BLOCK, seed=1)
    hold = Hold(setup.store, write_at=0)
    setup.write(extents[0], memory, io_class=IoClass.STATE)
    setup.write(extents[1], memory, io_class=IoClass.WRITE_BEHIND)
    wanted = setup.write(extents[2], memory, io_class=IoClass.BACKGROUND)
    with interrupted():
        setup.store.wait(wanted)
    hold.release()
    assert setup.store.wait(wanted) is None
    path = extents[2].path
    setup.store.close()
    assert values.tobytes() in Path(path).read_bytes()
    waits = {(who, whom) for who, whom, *_ in setup.scheduler.waits()}
    assert {("awaited", "state"), ("write_behind", "awaited")} <= waits and ("awaited", "write_behind") not in waits


def test_places_are_one_again_when_they_are_free(setup: Setup) -> None:
    """Extents of random lengths never overlap, and the files do not grow without end."""
    choose, taken, largest = random.Random(1), [], 0
    for _ in range(2000):
        if taken and choose.random() < 0.5:
            taken.pop(choose.randrange(len(taken)))
        elif len(taken) < 64:
            taken.append(setup.store.allocate(choose.randrange(1, 40 * BLOCK)))
        largest = max(largest, setup.store.taken_bytes)
        spans = sorted((e.path, e.offset, e.offset + e.nbytes) for e in taken)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    assert setup.store.file_bytes <= 2 * largest + 4 * STEP
    taken.clear()
    assert setup.store.taken_bytes == 0
    await_that(lambda: setup.store.file_bytes == sum(path.stat().st_size for path in setup.paths) <= 4 * STEP)


def test_files_keep_the_length_that_is_asked_for(setup: Setup) -> None:
    """Extents that are freed and allocated again make no file shorter or longer, until less is asked for.

    An extent is reserved without growing the file that holds least, or not at all.
    """
    assert setup.store.allocate_free(BLOCK) is None and setup.store.file_bytes == 0
    extents = [setup.store.allocate(8 << 20) for _ in range(4)]
    setup.store.keep_length()
    length = setup.store.file_bytes
    for _ in range(3):
        del extents[1:]
        extents += [setup.store.allocate_free((8 << 20) - 1) for _ in range(3)]
        assert None not in extents and setup.store.file_bytes == length == sum(
            each.stat().st_size for each in setup.paths
        )
    assert setup.store.allocate_free(8 << 20) is None
    del extents[2:]
    setup.store.keep_length()
    del extents[1:]
    await_that(lambda: setup.store.file_bytes <= (16 << 20) + 4 * STEP)


def test_a_file_system_without_room(setup: Setup) -> None:
    """If there is no room, the error has path and number, and the extents that exist stay."""
    extent, values = setup.written(BLOCK, seed=1)
    with pytest.raises(OSError, match="allocating") as caught:
        setup.store.allocate(1 << 62)
    assert caught.value.errno == errno.EFBIG and caught.value.filename in map(str, setup.paths)
    np.testing.assert_array_equal(setup.found(extent), values)


def test_what_cannot_be_transferred_is_refused(setup: Setup) -> None:
    """Only whole blocks inside an extent are transferred, and nothing after close()."""
    extent, (memory, _) = setup.store.allocate(BLOCK + 1), setup.content(4 * BLOCK)
    assert extent.nbytes == 2 * BLOCK

    def read(offset: int, nbytes: int) -> int:
        return setup.store.read(extent, offset=offset, address=memory.address, nbytes=nbytes)

    parts = ((0, 3 * BLOCK), (BLOCK, 2 * BLOCK), (1, BLOCK), (0, 5), (3 * BLOCK, BLOCK))
    for call, problem in (
        *((lambda part=part: read(*part), "not whole blocks") for part in parts),
        (lambda: setup.store.allocate(0), "no bytes"),
        (lambda: setup.store.allocate_free(0), "no bytes"),
        (lambda: setup.pool.take(0), "no bytes"),
        (lambda: TensorStore([]), "no files"),
        (lambda: [setup.store.close(), setup.store.close(), read(0, BLOCK)], "closed"),
    ):
        with pytest.raises(ValueError, match=problem):
            call()


def test_a_forked_child_leaves_it_alone(setup: Setup) -> None:
    """A forked child can use neither store nor memory, and frees nothing of the parent's."""
    (extent, values), dropped = setup.written(8 * STEP, seed=1), [setup.store.allocate(8 * STEP)]
    memory, length = [setup.pool.take(BLOCK)], setup.store.file_bytes

    def frees_nothing() -> bool:
        refused = is_refused(lambda: setup.pool.take(BLOCK))
        dropped.clear()
        memory.clear()
        setup.store.close()
        return refused and sum(path.stat().st_size for path in setup.paths) == length

    assert_in_fork(frees_nothing)
    np.testing.assert_array_equal(setup.found(extent), values)


def test_memory_in_use_is_never_lent_again() -> None:
    """A view keeps its memory. What comes back is lent again, in pieces of any length.

    Beyond the limit memory is used only as long as it is lent, whatever lies between what is lent.
    """
    pool, choose, held = MemoryPool(), random.Random(1), list[tuple[Bytes, int]]()
    pool.limit = 100 * BLOCK
    for number in range(500):
        nbytes = choose.randint(1, 40) * BLOCK
        while held and (choose.random() < 0.3 or pool.lent_bytes + nbytes > pool.limit):
            values, expected = held.pop(choose.randrange(len(held)))
            assert (values == expected).all()
            del values
        lent = np.frombuffer(pool.take(nbytes - 1).memoryview(), np.uint8)
        lent[:] = number % 256
        held.append((lent, number % 256))
        assert (lent.ctypes.data % BLOCK, pool.lent_bytes) == (0, sum(values.nbytes for values, _ in held))
        assert pool.lent_bytes <= pool.nbytes <= pool.limit
    held.clear()
    del lent
    leases = [pool.take(60 * BLOCK), pool.take(80 * BLOCK)]
    assert pool.nbytes == pool.lent_bytes == 140 * BLOCK
    leases.clear()
    assert pool.nbytes <= pool.limit
    pool.limit = 0
    assert pool.nbytes == 0


def test_a_slow_file_beside_a_fast_one(setup: Setup) -> None:
    """A read beside which many short ones have ended, with pauses between them, counts no time twice."""
    extents, rate = [setup.written(nbytes, seed=1)[0] for nbytes in (PART, BLOCK)], 5e6
    for extent, bytes_per_second in zip(extents, (rate, 2e6), strict=True):
        Throttle(setup.store, [setup.files[setup.paths.index(Path(extent.path))]]).bytes_per_second = bytes_per_second
    (slow, _), (fast, _) = setup.content(PART), setup.content(BLOCK)
    began, num_ended = time.perf_counter(), 0
    ticket = setup.read(extents[0], slow)
    while not setup.store.done(ticket):
        assert setup.store.wait(setup.read(extents[1], fast)) is None
        num_ended += 1
        time.sleep(1e-4)
    assert setup.store.wait(ticket) is None
    assert num_ended > 64  # the spans that are known one by one
    # The counter reads the clock after the request has, so each request may lose some microseconds.
    assert 0.95 * PART / rate <= setup.store.counters().read_busy_seconds <= time.perf_counter() - began


# ---- files grow and shrink while their disk does not answer: everything else goes on


def started(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def lengths(setup: Setup) -> int:
    return sum(path.stat().st_size for path in setup.paths)


def test_everything_else_goes_on_while_a_file_grows(setup: Setup) -> None:
    """Extents are read, written, allocated and freed meanwhile, and the store tells its sizes."""
    (kept, values), _in_the_other_file = setup.written(BLOCK, seed=1), setup.written(BLOCK, seed=3)
    hold, grown = Hold.of_resizing(setup.store), list[TensorExtent]()
    before = setup.store.file_bytes
    growing = [started(lambda: grown.append(setup.store.allocate(3 * STEP))) for _ in range(3)]
    await_that(lambda: hold.count > 0)
    found: list[object] = []
    join(started(lambda: found.append(setup.found(kept))))  # without Python's lock: if it waits, the test can tell
    np.testing.assert_array_equal(found[0], values)
    assert setup.store.taken_bytes == 2 * BLOCK and setup.store.file_bytes == before == lengths(setup)
    written: list[TensorExtent] = []
    join(started(lambda: written.append(setup.store.allocate(2 * BLOCK))))
    np.testing.assert_array_equal(setup.found(written[0]), np.zeros(2 * BLOCK, np.uint8))
    written.clear()
    assert setup.store.taken_bytes == 2 * BLOCK and not grown
    hold.release()
    join(*growing)
    assert setup.store.taken_bytes == 2 * BLOCK + 3 * 3 * STEP and setup.store.file_bytes == lengths(setup)
    assert len({(extent.path, extent.offset) for extent in grown}) == 3


def test_an_extent_is_freed_while_the_disk_does_not_answer(setup: Setup) -> None:
    """Who drops the last reference waits for nothing; an allocation that needs the file longer waits for its end."""
    kept, values = setup.written(BLOCK, seed=1)
    extents = [setup.store.allocate(8 * STEP) for _ in range(2)]
    before, hold = lengths(setup), Hold.of_resizing(setup.store)
    join(started(extents.clear))
    await_that(lambda: hold.count == 2)
    assert setup.store.taken_bytes == BLOCK and lengths(setup) == before
    np.testing.assert_array_equal(setup.found(kept), values)
    large: list[TensorExtent] = []
    growing = started(lambda: large.append(setup.store.allocate(16 * STEP)))
    hold.release()
    join(growing)
    assert large[0].nbytes == 16 * STEP
    del large[:]
    await_that(lambda: setup.store.file_bytes == lengths(setup) <= 4 * STEP)
