"""A failure on storage stops the batch, is reported with path and offset, and leaves the old place intact."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import Failure, HostBuffer, Identity, Operation, StateFile
from tests.helpers.golden import Floats, adam_step
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject
from tests.helpers.waiting import assert_threads_end, join, num_threads
from tests.native.builds import assert_in_fork, is_refused, run_python
from tests.native.stored import JOB, Run, StoredState, align, extent_bytes, takes_direct
from tests.native.test_pipeline import assert_same, initial, normals
from tests.storage.makers import flip

NUMEL = 10_000
TASKLET = 1024
REGION = align(4 * TASKLET)
TRAILER = 3 * REGION + 4096 - 128


def stored(folder: Path, **options: int) -> tuple[StoredState, tuple[Floats, ...]]:
    state = StoredState(folder, NUMEL, TASKLET, options=options)
    arrays = initial(NUMEL)
    state.write(*arrays)
    return state, arrays


def update(state: StoredState, **kwargs: bool) -> tuple[Failure | None, Floats]:
    parameter = normals(50, NUMEL)
    run = Run(0, NUMEL, 0, normals(51, NUMEL), parameter=parameter)
    return state.work(Operation.UPDATE, [run], [adam_step()], **kwargs), parameter


@pytest.mark.parametrize(
    ("position", "kind"),
    [
        pytest.param(0, "checksum", id="master"),
        pytest.param(REGION, "checksum", id="first of exp_avg"),
        pytest.param(2 * REGION - 1, "checksum", id="last of exp_avg"),
        pytest.param(2 * REGION + 4 * TASKLET - 1, "checksum", id="last of exp_avg_sq"),
        pytest.param(TRAILER, "format", id="magic"),
        pytest.param(TRAILER + 8, "format", id="version"),
        *[
            pytest.param(TRAILER + offset, "checksum", id=name)
            for name, offset in [
                ("state format", 12),
                ("job", 16),
                ("rank", 32),
                ("arrays", 36),
                ("tasklet", 40),
                ("generation", 48),
                ("numel", 56),
                ("extent bytes", 64),
                ("array checksum", 76),
                ("zeros", 110),
                ("trailer checksum", 124),
            ]
        ],
    ],
)
def test_a_flipped_bit(tmp_path: Path, position: int, kind: str) -> None:
    """One flipped bit anywhere in the data read is reported with file, offset and tasklet, whose parameters stay."""
    state, _ = stored(tmp_path)
    with state:
        flip(state.paths[0], state.extent_offset(4, state.place) + position)
        failure, parameter = update(state)
    assert failure is not None and (failure.kind, failure.tasklet, failure.errno) == (kind, 4, 0)
    its_own = slice(4 * TASKLET, 5 * TASKLET)
    np.testing.assert_array_equal(parameter[its_own], normals(50, NUMEL)[its_own])
    assert (failure.path, failure.offset) == (str(state.paths[0]), state.extent_offset(4, state.place))
    assert failure.path in failure.message and str(failure.offset) in failure.message


def exchanged(state: StoredState) -> None:
    """Put the extent of tasklet 3 where that of tasklet 4 should be."""
    content = bytearray(state.paths[0].read_bytes())
    third, fourth = state.extent_offset(3, state.place), state.extent_offset(4, state.place)
    content[fourth : fourth + state.extent_bytes] = content[third : third + state.extent_bytes]
    state.paths[0].write_bytes(content)


def identified(identity: Identity) -> Callable[[StoredState], None]:
    def change(state: StoredState) -> None:
        state.pipeline.close()
        state.identity = identity
        state.pipeline = state.open_pipeline()

    return change


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        pytest.param(identified(Identity(job=bytes(16), rank=3, state_format=0)), "foreign", "", id="another job"),
        pytest.param(identified(Identity(job=JOB, rank=4, state_format=0)), "foreign", "", id="another rank"),
        pytest.param(
            identified(Identity(job=JOB, rank=3, state_format=1)),
            "format",
            "state format is 0, expected 1",
            id="another format of equal length",
        ),
        pytest.param(exchanged, "foreign", "tasklet is 3, expected 4", id="another tasklet"),
        pytest.param(lambda state: setattr(state, "generation", 2), "generation", "", id="another generation"),
        pytest.param(lambda state: setattr(state, "numel", NUMEL - 1), "format", "", id="another length"),
        pytest.param(lambda state: setattr(state, "place", 0), "format", "", id="never written"),
    ],
)
def test_an_extent_of_another(tmp_path: Path, change: Callable[[StoredState], None], kind: str, told: str) -> None:
    """An extent that is not the one that is looked for, or none, is refused."""
    state, _ = stored(tmp_path)
    with state:
        assert (state.generation, state.place) == (1, 1)
        change(state)
        failure, _ = update(state)
    assert failure is not None and failure.kind == kind and told in failure.message


@pytest.mark.parametrize(("direct", "missing"), [(True, 4096), (True, 513), (False, 8192), (False, 1), (False, 5000)])
def test_short_file(tmp_path: Path, direct: bool, missing: int) -> None:
    """A file that ends inside an extent is reported as short, also when it ends inside a block."""
    state = StoredState(tmp_path, NUMEL, TASKLET, direct=direct and takes_direct(tmp_path))
    with state:
        state.write(*initial(NUMEL))
        last = state.num_tasklets - 1
        end = state.extent_offset(last, state.place) + extent_bytes(NUMEL - last * TASKLET)
        os.truncate(state.paths[0], end - missing)
        failure, _ = update(state)
    assert failure is not None and (failure.kind, failure.tasklet, failure.errno) == ("short", last, 0)
    assert failure.path == str(state.paths[0])


@pytest.mark.parametrize("seed", long_but(range(2), range(12)))
def test_wait_reports_and_finish_ends(tmp_path: Path, seed: int) -> None:
    """wait() returns a failure once it has occurred. finish() returns it too and allows the next batch."""
    state, arrays = stored(tmp_path, num_buffers=2)
    with state:
        inject(state.pipeline, seed=seed, max_delay_us=300, fail_read_at=3, errno=errno.ENODEV)
        runs = [Run(0, NUMEL, 0, normals(51, NUMEL))]
        state.start(Operation.UPDATE, runs, [adam_step()])
        found = [state.pipeline.wait(), state.pipeline.wait(0, 1)]
        with pytest.raises(ValueError, match="active"):
            state.start(Operation.UPDATE, runs, [adam_step()])
        found.append(state.pipeline.finish())
        assert [failure and failure.errno for failure in found] == 3 * [errno.ENODEV]
        assert state.pipeline.finish() is None and state.pipeline.wait() is None
        assert_same(state.read(), arrays)


def test_file_size_limit(tmp_path: Path) -> None:
    """A write stopped half-way by the file size limit ends in EFBIG, and its signal does not kill the process.

    The same holds for direct I/O that the limit cuts inside a block.
    """
    code = f"""
    import os, resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    from pathlib import Path
    from lightning_smartinfinity.native import Operation
    from tests.native.stored import StoredState
    for direct, limit in ((False, 5 * 4096), ({takes_direct(tmp_path)}, 5 * 4096 + 100)):
        state = StoredState(Path({str(tmp_path)!r}), {TASKLET}, direct=direct)  # its extent: blocks 4 to 7
        os.truncate(state.paths[0], 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        failure = state.work(Operation.WRITE, [])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        state.pipeline.close()
        print(failure.kind, failure.errno)
    """
    assert run_python(code).split() == 2 * ["io", str(errno.EFBIG)]


# ---- lifetimes of memory, descriptors, threads and processes


LARGE = 20_000
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
    assert (buffer.nbytes, buffer.address % (HUGE_PAGE if nbytes >= HUGE_PAGE else 4096)) == (nbytes, 0)
    array = np.frombuffer(buffer.memoryview(), np.uint8)
    assert (len(array), array.ctypes.data) == (nbytes, buffer.address) and not array.any()
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
    gradient, parameter = normals(1, LARGE), normals(2, LARGE)
    inject(state.pipeline, seed=seed, max_delay_us=3000)
    state.start(Operation.UPDATE, [Run(0, LARGE, 0, gradient, parameter=parameter)], [adam_step()])
    return gradient, parameter


@pytest.mark.parametrize("seed", long_but(range(2), range(12)))
def test_close_with_work_in_flight(tmp_path: Path, seed: int) -> None:
    """close() stops the batch, fails waiting calls, and leaves no thread. The old place stays intact."""
    arrays, threads = initial(LARGE), num_threads()
    with StoredState(tmp_path, LARGE, 1024, options={"num_buffers": 4, "compute_threads": 2}) as state:
        state.write(*arrays)
        _memory = start_slow_update(state, seed=seed)
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
        state.pipeline = state.open_pipeline()
        assert_same(state.read(), arrays)


@pytest.mark.parametrize("seed", long_but(range(2), range(12)))
def test_destruction_with_work_in_flight(tmp_path: Path, seed: int) -> None:
    """Dropping the last reference closes the pipeline and ends its threads."""
    threads = num_threads()
    state = StoredState(tmp_path, LARGE, 1024)
    state.write(*initial(LARGE))
    _memory = start_slow_update(state, seed=seed)
    del state
    gc.collect()
    assert_threads_end(threads)


@pytest.mark.parametrize("seed", long_but(range(2), range(12)))
def test_fork_with_work_in_flight(tmp_path: Path, seed: int) -> None:
    """A forked child cannot use the pipeline, does not hang on it and lacks the buffers. The parent is undisturbed."""
    buffer = HostBuffer(HUGE_PAGE)
    with StoredState(tmp_path, LARGE, 1024, options={"num_buffers": 3}) as state:
        state.write(*initial(LARGE))
        _memory = start_slow_update(state, seed=seed)

        def does_not_hang() -> bool:
            refused = [is_refused(getattr(state.pipeline, name)) for name in ("wait", "finish", "counters")]
            state.pipeline.close()
            del state.pipeline
            return refused == [True, True, True] and not is_mapped(buffer.address)

        assert_in_fork(does_not_hang)
        assert state.pipeline.finish() is None


def test_interpreter_exit_with_work_in_flight(tmp_path: Path) -> None:
    """A script may end with work in flight and without closing anything."""
    code = f"""
    from pathlib import Path
    from tests.native.stored import StoredState
    from tests.native.test_failures import initial, start_slow_update
    state = StoredState(Path({str(tmp_path)!r}), {LARGE}, 1024)
    state.write(*initial({LARGE}))
    memory = start_slow_update(state, seed=1)
    state.itself = state
    """
    assert run_python(code) == ""
