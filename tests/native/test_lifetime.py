"""Lifetimes of memory, descriptors, threads and processes."""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import Failure, HostBuffer, Operation, StateFile
from tests.helpers.golden import adam_step
from tests.helpers.native_testing import inject
from tests.helpers.waiting import assert_threads_end, join, num_threads
from tests.native.builds import assert_in_fork, is_refused, run_python
from tests.native.stored import Run, StoredState
from tests.native.test_pipeline import assert_same, initial, normals

NUMEL = 20_000
HUGE_PAGE = 2 << 20


def is_mapped(address: int) -> bool:
    """Return whether this process has memory at an address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(low <= address < high for low, high in spans)


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 5, 5 * HUGE_PAGE])
def test_host_buffer(nbytes: int) -> None:
    """A host buffer is zero, writable and page-aligned. From the size of a huge page on it is aligned to one."""
    buffer = HostBuffer(nbytes)
    assert buffer.nbytes == nbytes
    assert buffer.address % (HUGE_PAGE if nbytes >= HUGE_PAGE else 4096) == 0
    array = np.frombuffer(buffer.memoryview(), np.uint8)
    assert (len(array), array.ctypes.data) == (nbytes, buffer.address)
    assert not array.any()
    array[:] = 1


def test_a_buffer_lives_as_long_as_any_view_of_it() -> None:
    """Its memory goes back with the last view."""
    buffer = HostBuffer(3 * HUGE_PAGE)
    middle = buffer.address + HUGE_PAGE
    array = np.frombuffer(buffer.memoryview(), np.float32)
    del buffer
    gc.collect()
    array[:] = 3
    assert array.sum() == 3 * array.size and is_mapped(middle)
    del array
    gc.collect()
    assert not is_mapped(middle)


def test_state_file(tmp_path: Path) -> None:
    """A state file opens an existing file and reports errors with errno and filename."""
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError) as error:
        StateFile(str(path), direct=False)
    assert (error.value.errno, error.value.filename) == (errno.ENOENT, str(path))
    path.touch()
    file = StateFile(str(path), direct=False)
    file.sync()
    for _ in range(2):
        file.close()
    with pytest.raises(RuntimeError, match="closed"):
        file.sync()


def start_slow_update(state: StoredState, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Start a slow update and return the arrays that it uses."""
    gradient, parameter = normals(1, NUMEL), normals(2, NUMEL)
    inject(state.pipeline, seed=seed, max_delay_us=3000)
    state.start(Operation.UPDATE, [Run(0, NUMEL, 0, gradient, parameter=parameter)], [adam_step()])
    return gradient, parameter


@pytest.mark.parametrize("seed", range(2))
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


@pytest.mark.parametrize("seed", range(2))
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


@pytest.mark.parametrize("seed", range(2))
def test_fork_with_work_in_flight(tmp_path: Path, seed: int) -> None:
    """A forked child cannot use the pipeline, does not hang on it and lacks the buffers. The parent is undisturbed."""
    buffer = HostBuffer(HUGE_PAGE)
    with StoredState(tmp_path, NUMEL, 1024, options={"num_buffers": 3}) as state:
        state.write(*initial(NUMEL))
        memory = start_slow_update(state, seed=seed)

        def does_not_hang() -> bool:
            refused = [is_refused(getattr(state.pipeline, name)) for name in ("wait", "finish", "counters")]
            state.pipeline.close()
            del state.pipeline
            return refused == [True, True, True] and not is_mapped(buffer.address)

        assert_in_fork(does_not_hang)
        assert state.pipeline.finish() is None
        del memory


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
