"""The I/O engines behind a pipeline: which are available, which is chosen, and equal results from all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.native import Failure, FileQueue, HostBuffer, Operation, StateFile, TensorStore
from tests.helpers.native_testing import inject
from tests.helpers.waiting import assert_threads_end, await_that, num_threads
from tests.native.builds import assert_in_fork, is_refused, run_python
from tests.native.stored import Run, StoredState, takes_direct
from tests.native.test_pipeline import (
    NUMEL,
    STEPS,
    assert_same,
    initial,
    normals,
    work_two_steps,
)

ENGINES = [name for name, _ in native.io_engines()]


def test_engines_there_are() -> None:
    """Engines are listed fastest first. Threads are always available, and here all are. Others are refused."""
    assert ENGINES == ["io_uring", "threads", "plain"]
    assert dict(native.io_engines())["threads"] is None and dict(native.io_engines())["io_uring"] is None
    with pytest.raises(ValueError, match="no I/O engine 'spdk'"):
        FileQueue(io_engine="spdk")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_same_results(tmp_path: Path, engine: str, direct: bool) -> None:
    """Every engine gives the same bits on direct and buffered files, with short and reordered transfers.

    io_uring registers the whole ring of buffers once. System calls are counted, at most a few per transfer, and so is
    the CPU time of the engine.
    """
    if direct and not takes_direct(tmp_path):
        pytest.fail("the test folder has no direct I/O")
    options = {"io_engine": engine, "num_buffers": 3}
    with StoredState(tmp_path, NUMEL, 2048, num_files=2, direct=direct, options=options) as state:
        assert state.pipeline.io_engine == engine
        inject(state.pipeline, seed=3, max_delay_us=500, short_transfer_every=3)
        before = state.pipeline.counters()
        work_two_steps(state)
        after = state.pipeline.counters()
        registered = state.pipeline.ring_bytes if engine == "io_uring" else 0
    assert (after.registered_bytes, after.registration_errno) == (registered, 0)
    if engine in ("io_uring", "threads"):
        transfers = after.read_calls + after.write_calls
        assert transfers <= after.system_calls - before.system_calls + transfers // 2 <= 4 * transfers
        assert after.io_cpu_seconds > before.io_cpu_seconds


@pytest.mark.parametrize("engine", ENGINES)
def test_many_requests_at_once(tmp_path: Path, engine: str) -> None:
    """More requests than a ring has entries complete, in any order. Each ticket belongs to its own request.

    A full device then fails a write.
    """
    num_requests, block = 1000, 4096
    path = tmp_path / "file"
    path.touch()
    file = StateFile(str(path), direct=True)
    source, target = HostBuffer(num_requests * block), HostBuffer(num_requests * block)
    written = np.frombuffer(source.memoryview(), np.uint8)
    written[:] = np.random.default_rng(0).integers(0, 256, len(written), np.uint8)
    queue = FileQueue(io_engine=engine)
    for start, memory in ((queue.write, source), (queue.read, target)):
        tickets = [
            start(file, offset=index * block, address=memory.address + index * block, nbytes=block)
            for index in np.random.default_rng(1).permutation(num_requests).tolist()
        ]
        assert [queue.wait(ticket) for ticket in tickets] == [None] * num_requests
    np.testing.assert_array_equal(np.frombuffer(target.memoryview(), np.uint8), written)
    assert queue.counters().system_calls < 6 * num_requests
    full = StateFile("/dev/full", direct=False)
    failure = queue.wait(queue.write(full, offset=0, address=source.address, nbytes=block))
    assert failure is not None and (failure.kind, failure.errno, failure.path) == ("io", errno.ENOSPC, "/dev/full")
    queue.close()


WITHOUT_URING = """
    import ctypes, struct
    import sys
    # A filter as containers have it: the system call fails with EPERM.
    program = b"".join(struct.pack("HBBI", *line) for line in (
        (0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)))
    held = ctypes.create_string_buffer(program)
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filters, 0, 0) == 0
    from lightning_smartinfinity import native
    print(dict(native.io_engines())["io_uring"])
    queue = native.FileQueue()
    queue.close()
    try:
        native.FileQueue(io_engine="io_uring")
    except OSError as error:
        print(error)
"""


@pytest.mark.parametrize("call", [pytest.param(425, id="io_uring_setup"), pytest.param(426, id="io_uring_enter")])
def test_where_io_uring_is_forbidden(call: int) -> None:
    """If io_uring is forbidden, threads are used, and asking for io_uring fails with the reason."""
    reason, error = run_python(WITHOUT_URING, str(call)).splitlines()
    assert reason == "the system refuses io_uring (Operation not permitted)" and reason in error


UNPRIVILEGED = """
    import os, resource, sys
    import numpy.random, numpy.testing
    from tests.native.test_pipeline import NUMEL, work_two_steps
    from tests.native.stored import StoredState
    from pathlib import Path
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
    os.chdir(sys.argv[1])  # whose parents may be closed to others
    if os.geteuid() == 0:
        os.chmod(".", 0o777)
        os.setgid(65534)
        os.setuid(65534)
    options = {"io_engine": "io_uring", "num_buffers": 24, "buffer_bytes": 1 << 20}
    with StoredState(Path(), NUMEL, 2048, options=options) as state:
        work_two_steps(state)
        counters = state.pipeline.counters()
        print(state.pipeline.ring_bytes, counters.registered_bytes, counters.registration_errno)
"""


WITHOUT_DESCRIPTORS = """
    import os, resource, sys
    from tests.native.test_pipeline import NUMEL, work_two_steps
    from tests.native.stored import StoredState
    from pathlib import Path
    with StoredState(Path(sys.argv[1]), NUMEL, 2048) as state:
        state.pipeline.close()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, limit[1]))  # the file, and one that is not enough
        state.pipeline = state.open_pipeline()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        print(state.pipeline.io_engine)
        work_two_steps(state)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [(UNPRIVILEGED, f"{24 << 20} 0 {errno.ENOMEM}\n"), (WITHOUT_DESCRIPTORS, "threads\n")],
    ids=["without privileges and with little memory to lock", "too few descriptors for a ring"],
)
def test_what_a_process_lacks(tmp_path: Path, code: str, printed: str) -> None:
    """A ring of 24 MiB works unregistered under a limit of 8 MiB, and the kernel's error number is kept.

    With too few descriptors for io_uring, I/O runs in threads, and stays there when descriptors are free again.
    """
    assert run_python(code, tmp_path) == printed


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("which", ["read", "write"])
def test_every_request_may_fail(tmp_path: Path, engine: str, which: str) -> None:
    """Whichever request fails with others in flight, the old place stays intact, and the next batch works.

    The failure names the file at fault: that from which a tasklet was read, or that to which it was to be written.
    """
    gradient, parameter, arrays = normals(1), np.zeros(NUMEL, np.float32), initial()
    options = {"io_engine": engine, "num_buffers": 3, "compute_threads": 2}
    with StoredState(tmp_path, NUMEL, 4096, num_files=2, wanders=True, options=options) as state:
        state.write(*arrays)
        runs = [Run(0, NUMEL, 0, gradient, parameter=parameter)]
        for number in range(state.num_tasklets):
            at = {f"fail_{which}_at": number}
            inject(state.pipeline, seed=number, max_delay_us=200, short_transfer_every=number % 3, **at)
            failure = state.work(Operation.UPDATE, runs, STEPS)
            path = state.paths[state.file_of(failure.tasklet, state.place if which == "read" else 1 - state.place)]
            assert (failure.kind, failure.errno, failure.path) == ("io", errno.EIO, str(path))
            assert failure.path in failure.message
        inject(state.pipeline)
        assert_same(state.read(), arrays)
        assert state.work(Operation.UPDATE, runs, STEPS) is None


def open_descriptors() -> set[int]:
    """Return the open descriptors of this process, without that by which they are listed."""
    return {int(number) for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")}


@pytest.mark.parametrize("engine", ENGINES)
def test_descriptors_are_closed_on_exec(tmp_path: Path, engine: str) -> None:
    """A program started by the training process inherits neither state files nor rings. A closed pipeline has none."""
    before, threads = open_descriptors(), num_threads()
    with StoredState(tmp_path, NUMEL, 2048, options={"io_engine": engine}):
        opened = open_descriptors() - before
        assert opened and not any(os.get_inheritable(descriptor) for descriptor in opened)
    assert open_descriptors() == before
    assert_threads_end(threads)


def num_rings() -> int:
    """Return the number of this process's threads that submit to a ring."""
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    return names.count("smart-inf-ring\n")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_device_has_a_ring(tmp_path: Path, engine: str) -> None:
    """One thread does not submit to all drives: each file system has a ring of its own, for state and for tensors."""
    before, of_device = num_rings(), int(engine == "io_uring")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as elsewhere:
        (tmp_path / "state-1.bin").symlink_to(elsewhere.name)
        options = {"io_engine": engine}
        with StoredState(tmp_path, NUMEL, 2048, num_files=2, wanders=True, direct=False, options=options) as state:
            assert num_rings() - before == 2 * of_device
            state.write(*initial())
            assert_same(state.read(), initial())
            files = [StateFile(str(path), direct=False) for path in state.paths]
            stores = [TensorStore(files, io_engine=engine), TensorStore(2 * files[:1], io_engine=engine)]
            assert num_rings() - before == 5 * of_device
            for store in stores:
                store.close()
    await_that(lambda: num_rings() == before)


# ---- transfers of plain content between memory and files: complete, or failed with path, offset and errno

BLOCK = 4096
# Three parts and one more block.
NUM_BYTES = 3 * (4 << 20) + BLOCK


def buffer(nbytes: int = NUM_BYTES, *, seed: int | None = None) -> tuple[HostBuffer, NDArray[np.uint8]]:
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
    assert Path(file.path).read_bytes() == bytes(BLOCK) + written.tobytes() + bytes(BLOCK)
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
    assert isinstance(failure, Failure) and (failure.kind, failure.errno, failure.path) == (kind, number, file.path)
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
    read = partial(queue.read, file, offset=0, address=memory.address, nbytes=BLOCK)
    assert_in_fork(lambda: is_refused(read) and queue.close() is None)
    assert queue.wait(read()) is None
