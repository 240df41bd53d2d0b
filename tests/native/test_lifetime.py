"""Lifetimes of memory, descriptors, threads and processes."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import Failure, HostBuffer, Operation, StateFile
from tests.helpers.native_testing import inject
from tests.helpers.update_rules import adam_step
from tests.helpers.waiting import assert_threads_end, join, num_threads
from tests.native.builds import run_python
from tests.native.stored import Run, StoredState
from tests.native.test_pipeline import assert_same, initial, normals

NUMEL = 20_000
HUGE_PAGE = 2 << 20


def smaps(address: int) -> dict[str, str]:
    """Return the kernel's description of the mapping at an address."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside:
            found[first.rstrip(":")] = rest.strip()
    return found


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 5, 5 * HUGE_PAGE])
def test_host_buffer(nbytes: int) -> None:
    """A host buffer is zero, writable and page-aligned. From the size of a huge page on it is aligned to one."""
    buffer = HostBuffer(nbytes)
    assert buffer.nbytes == nbytes
    assert buffer.address % (HUGE_PAGE if nbytes >= HUGE_PAGE else 4096) == 0
    view = buffer.memoryview()
    assert (len(view), view.readonly) == (nbytes, False)
    array = np.frombuffer(view, np.uint8)
    assert array.ctypes.data == buffer.address
    assert not array.any()
    array[:] = 1
    assert int(array.sum()) == nbytes


def test_the_mapping_of_a_buffer() -> None:
    """It is not copied into children, asks for huge pages, and lives as long as any view of it, and no longer."""
    buffer = HostBuffer(3 * HUGE_PAGE)
    address = buffer.address
    flags = smaps(address)["VmFlags"].split()
    assert "dc" in flags
    assert ("hg" in flags) == Path("/sys/kernel/mm/transparent_hugepage").exists()
    array = np.frombuffer(buffer.memoryview(), np.float32)
    del buffer
    gc.collect()
    array[:] = 3
    assert array.sum() == 3 * array.size
    del array
    gc.collect()
    assert "dc" not in smaps(address).get("VmFlags", "").split()


def test_state_file(tmp_path: Path) -> None:
    """A state file opens an existing file with close-on-exec and reports errors with errno and filename."""
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError) as error:
        StateFile(str(path), direct=False)
    assert (error.value.errno, error.value.filename) == (errno.ENOENT, str(path))
    with pytest.raises(IsADirectoryError):
        StateFile(str(tmp_path), direct=False)
    path.touch()
    file = StateFile(str(path), direct=False)
    assert (file.path, file.direct) == (str(path), False)
    flags = [descriptor_flags(number) for number in descriptors(path)]
    assert len(flags) == 1 and flags[0] & os.O_CLOEXEC
    file.sync()
    file.close()
    file.close()
    assert descriptors(path) == []
    with pytest.raises(RuntimeError, match="closed"):
        file.sync()


def descriptors(path: Path) -> list[int]:
    numbers = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry) == str(path):
                numbers.append(int(entry.name))
        except FileNotFoundError:
            continue
    return numbers


def descriptor_flags(number: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags"))


def start_slow_update(state: StoredState, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Start a slow update and return the arrays that it uses."""
    gradient, parameter = normals(1, NUMEL), normals(2, NUMEL)
    inject(state.pipeline, seed=seed, max_delay_us=3000)
    state.start(Operation.UPDATE, [Run(0, NUMEL, 0, gradient, parameter=parameter)], [adam_step()])
    return gradient, parameter


@pytest.mark.parametrize("seed", range(4))
def test_close_with_work_in_flight(tmp_path: Path, seed: int) -> None:
    """close() stops the batch, fails waiting calls, and leaves no thread. The old place stays intact."""
    arrays, threads = initial(NUMEL), num_threads()
    with StoredState(tmp_path, NUMEL, 1024, options={"num_buffers": 4, "compute_threads": 2}) as state:
        state.write(*arrays)
        memory = start_slow_update(state, seed=seed)
        results: list[Failure | None] = []

        def wait() -> None:
            with contextlib.suppress(ValueError):  # the pipeline was closed before the wait
                results.append(state.pipeline.wait())

        waiter = threading.Thread(target=wait)
        waiter.start()
        state.pipeline.wait(0, 1)
        state.pipeline.close()
        state.pipeline.close()
        join(waiter)
        assert_threads_end(threads)
        # On a busy machine the batch may have ended before close() was called.
        assert all(failure is None or (failure.kind, failure.errno) == ("io", errno.ECANCELED) for failure in results)
        for method in (state.pipeline.wait, state.pipeline.finish):
            with pytest.raises(ValueError, match="closed"):
                method()
        del memory
        state.pipeline = state.open_pipeline()
        assert_same(state.read(), arrays)


@pytest.mark.parametrize("seed", range(4))
def test_destruction_with_work_in_flight(tmp_path: Path, seed: int) -> None:
    """Dropping the last reference closes the pipeline and ends its threads."""
    threads = num_threads()
    state = StoredState(tmp_path, NUMEL, 1024)
    state.write(*initial(NUMEL))
    memory = start_slow_update(state, seed=seed)
    del state
    gc.collect()
    assert_threads_end(threads)
    del memory


def test_other_python_threads_run_during_a_wait(tmp_path: Path) -> None:
    """finish() releases the interpreter lock, so that other Python threads run."""
    with StoredState(tmp_path, NUMEL, 1024, options={"num_buffers": 1}) as state:
        state.write(*initial(NUMEL))
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # a thread runs only when another one releases the lock
        try:
            assert any(another_thread_ran(state, seed) for seed in range(12))
        finally:
            sys.setswitchinterval(interval)


def another_thread_ran(state: StoredState, seed: int) -> bool:
    gate, ran = threading.Lock(), threading.Event()
    gate.acquire()

    def run() -> None:
        with gate:
            ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    memory = start_slow_update(state, seed=seed)
    gate.release()
    assert state.pipeline.finish() is None
    result = ran.is_set()
    join(thread)
    del memory
    return result


@pytest.mark.parametrize("seed", range(4))
def test_fork_with_work_in_flight(tmp_path: Path, seed: int) -> None:
    """A forked child cannot use the pipeline, does not hang on it and lacks the buffers. The parent is undisturbed."""
    buffers = [HostBuffer(HUGE_PAGE)]
    with StoredState(tmp_path, NUMEL, 1024, options={"num_buffers": 3}) as state:
        state.write(*initial(NUMEL))
        memory = start_slow_update(state, seed=seed)
        child = os.fork()
        if child == 0:
            os._exit(child_result(state, buffers))
        assert state.pipeline.finish() is None
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del memory


def child_result(state: StoredState, buffers: list[HostBuffer]) -> int:
    """Return 0 on success. In a forked child a failed assertion would return into pytest."""
    signal.alarm(60)  # a hanging child then fails the test instead of blocking it
    try:
        if smaps(buffers[0].address):
            return 2
        for name in ("wait", "finish", "counters"):
            try:
                getattr(state.pipeline, name)()
            except RuntimeError:
                continue
            return 3
        state.pipeline.close()
        if sys.getrefcount(state.pipeline) > 2:
            return 4
        del state.pipeline
        buffers.clear()
        return 0
    except BaseException:
        return 5


def test_interpreter_exit_with_work_in_flight(tmp_path: Path) -> None:
    """A script may end with work in flight and without closing anything."""
    code = f"""
    from pathlib import Path
    from tests.native.stored import StoredState
    from tests.native.test_lifetime import initial, start_slow_update
    state = StoredState(Path({str(tmp_path)!r}), {NUMEL}, 1024)
    state.write(*initial({NUMEL}))
    memory = start_slow_update(state, seed=1)
    state.itself = state
    """
    assert run_python(code) == ""
