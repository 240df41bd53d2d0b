"""Transfers of plain content between memory and files: complete, or failed with path, offset and errno."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_smartinfinity.native import Failure, FileQueue, HostBuffer, StateFile
from tests.helpers.native_testing import inject
from tests.native.stored import takes_direct

BLOCK = 4096
# Three parts and one more block.
NUM_BYTES = 3 * (4 << 20) + BLOCK

Bytes = NDArray[np.uint8]


def buffer(nbytes: int = NUM_BYTES, *, seed: int | None = None) -> tuple[HostBuffer, Bytes]:
    memory = HostBuffer(nbytes)
    values = np.frombuffer(memory.memoryview(), np.uint8)
    if seed is not None:
        values[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory, values


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    """A file two blocks longer than the tests' content."""
    path = tmp_path / "file"
    path.write_bytes(bytes(NUM_BYTES + 2 * BLOCK))
    return StateFile(str(path), direct=takes_direct(tmp_path))


@pytest.mark.parametrize(
    "faults", [{}, {"max_delay_us": 300, "short_transfer_every": 2, "seed": 5}], ids=["plain", "short and out of order"]
)
def test_what_is_written_is_read(file: StateFile, faults: dict[str, int]) -> None:
    """Every byte is written to its place and read back, even with short and delayed transfers."""
    queue = FileQueue(io_threads=3)
    inject(queue, **faults)
    source, written = buffer(seed=1)
    assert queue.wait(queue.write(file, offset=BLOCK, address=source.address, nbytes=NUM_BYTES)) is None
    target, read = buffer()
    assert queue.wait(queue.read(file, offset=BLOCK, address=target.address, nbytes=NUM_BYTES)) is None
    np.testing.assert_array_equal(read, written)
    content = Path(file.path).read_bytes()
    assert content == bytes(BLOCK) + written.tobytes() + bytes(BLOCK)
    counters = queue.counters()
    assert counters.read_bytes >= NUM_BYTES and counters.written_bytes >= NUM_BYTES
    assert faults or (counters.read_bytes, counters.read_calls) == (NUM_BYTES, 4)


@pytest.mark.parametrize(
    ("start", "faults", "kind", "number"),
    [
        ("read", {"fail_read_at": 2}, "io", errno.EIO),
        ("write", {"fail_write_at": 1, "errno": errno.ENOSPC}, "io", errno.ENOSPC),
        pytest.param("read", {}, "short", 0, id="past the end"),
    ],
)
def test_a_failing_transfer(file: StateFile, start: str, faults: dict[str, int], kind: str, number: int) -> None:
    """If one part fails, the request fails with path, offset and errno, and the next request works."""
    queue, (memory, _) = FileQueue(), buffer()
    inject(queue, **faults)
    begin: Callable[..., int] = getattr(queue, start)
    end = NUM_BYTES + 2 * BLOCK
    offset, nbytes = (0, NUM_BYTES) if faults else (end - BLOCK, 2 * BLOCK)
    failure = queue.wait(begin(file, offset=offset, address=memory.address, nbytes=nbytes))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.errno, failure.path) == (kind, number, file.path)
    assert f"offset {failure.offset}" in failure.message and file.path in failure.message
    assert "tasklet" not in failure.message
    assert os.strerror(number) in failure.message if faults else failure.offset == end
    assert queue.wait(begin(file, offset=0, address=memory.address, nbytes=BLOCK)) is None


def test_what_cannot_be_transferred_is_refused(file: StateFile) -> None:
    """Bad arguments, unknown tickets, and a closed queue or file are refused, and nothing is in flight."""
    queue, (memory, _) = FileQueue(), buffer(2 * BLOCK)

    def read(queue: FileQueue = queue, offset: int = 0, address: int = 0, nbytes: int = BLOCK) -> int:
        return queue.read(file, offset=offset, address=memory.address + address, nbytes=nbytes)

    ticket = read()
    assert [queue.wait(ticket), queue.wait(ticket)] == [None, None]
    in_blocks = [{"offset": 1}, {"address": 8}, {"nbytes": 100}] if file.direct else []
    for call, problem in (
        (lambda: read(nbytes=0), "no bytes"),
        *((lambda part=part: read(**part), "whole blocks") for part in in_blocks),
        (lambda: queue.wait(ticket + 1), "no ticket"),
        (lambda: FileQueue(io_threads=0), "io_threads"),
        (lambda: FileQueue(timeout_ms=0), "timeout_ms must be at least 1"),
        (lambda: FileQueue(timeout_ms=-1), "timeout_ms must be at least 1"),
        (lambda: [queue.close(), queue.close(), read()], "closed"),
    ):
        with pytest.raises(ValueError, match=problem):
            call()
    assert queue.counters().read_bytes == BLOCK
    file.close()
    with pytest.raises(RuntimeError, match="closed"):
        read(FileQueue())


def test_closing_waits_for_what_is_in_flight(file: StateFile) -> None:
    """close() finishes the requests in flight, even if their file was closed before."""
    queue, (memory, written) = FileQueue(), buffer(seed=4)
    inject(queue, max_delay_us=2000, seed=1)
    queue.write(file, offset=0, address=memory.address, nbytes=NUM_BYTES)
    file.close()
    queue.close()
    assert Path(file.path).read_bytes()[:NUM_BYTES] == written.tobytes()


def test_a_forked_child_leaves_it_alone(file: StateFile) -> None:
    """A forked child cannot use the queue but can close it. The parent's queue continues."""
    queue, (memory, _) = FileQueue(), buffer(BLOCK)
    child = os.fork()
    if child == 0:
        try:
            queue.read(file, offset=0, address=memory.address, nbytes=BLOCK)
        except RuntimeError:
            queue.close()
            del queue
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert queue.wait(queue.read(file, offset=0, address=memory.address, nbytes=BLOCK)) is None
