"""A failure on storage stops the batch, is reported with path and offset, and leaves the old place intact."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import lightning_smartinfinity.native._core as core
from lightning_smartinfinity.native import Batch, Failure, Identity, Operation, Pipeline, StateFile
from tests.helpers.native_testing import inject
from tests.helpers.update_rules import Floats, adam_step
from tests.helpers.waiting import PROCESS_LIMIT
from tests.native.stored import JOB, Run, StoredState, align, extent_bytes, takes_direct
from tests.native.test_pipeline import assert_same, initial, normals

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


def flip(state: StoredState, tasklet: int, position: int) -> None:
    """Flip a bit of the tasklet's current extent."""
    with state.paths[0].open("r+b") as file:
        file.seek(state.extent_offset(tasklet, state.place) + position)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


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
    """One flipped bit anywhere in the data read is found and reported with file, offset and tasklet."""
    state, _ = stored(tmp_path)
    with state:
        flip(state, tasklet=4, position=position)
        failure, _ = update(state)
    assert failure is not None
    assert (failure.kind, failure.tasklet, failure.errno) == (kind, 4, 0)
    assert failure.path == str(state.paths[0])
    assert failure.offset == state.extent_offset(4, state.place)
    assert failure.path in failure.message and str(failure.offset) in failure.message


def test_nothing_is_written_out_of_a_damaged_extent(tmp_path: Path) -> None:
    """A tasklet with a wrong checksum leaves its parameters as they were."""
    state, _ = stored(tmp_path)
    with state:
        flip(state, tasklet=0, position=2 * REGION)
        failure, parameter = update(state)
    assert failure is not None
    np.testing.assert_array_equal(parameter[:TASKLET], normals(50, NUMEL)[:TASKLET])


def test_master_in_parameter_does_not_read_the_master(tmp_path: Path) -> None:
    """With the master in the parameter, a flipped bit in the stored master does not matter. One in a moment does."""
    state, _ = stored(tmp_path)
    with state:
        flip(state, tasklet=2, position=5)
        assert update(state, master_in_parameter=True)[0] is None
        flip(state, tasklet=2, position=REGION + 5)
        failure, _ = update(state, master_in_parameter=True)
    assert failure is not None and failure.kind == "checksum"


def test_foreign_job_and_rank(tmp_path: Path) -> None:
    """An extent of another job or rank is refused."""
    state, _ = stored(tmp_path)
    with state:
        for other in (Identity(job=bytes(16), rank=3, state_format=0), Identity(job=JOB, rank=4, state_format=0)):
            state.pipeline.close()
            state.identity = other
            state.pipeline = state.open_pipeline()
            failure, _ = update(state)
            assert failure is not None and failure.kind == "foreign"


def test_foreign_tasklet(tmp_path: Path) -> None:
    """An extent that lies where another tasklet's should is refused."""
    state, _ = stored(tmp_path)
    content = bytearray(state.paths[0].read_bytes())
    third, fourth = state.extent_offset(3, state.place), state.extent_offset(4, state.place)
    content[fourth : fourth + state.extent_bytes] = content[third : third + state.extent_bytes]
    state.paths[0].write_bytes(content)
    with state:
        failure, _ = update(state)
    assert failure is not None and (failure.kind, failure.tasklet) == ("foreign", 4)
    assert "tasklet is 3, expected 4" in failure.message


def test_wrong_generation(tmp_path: Path) -> None:
    """An extent of another generation is refused."""
    state, _ = stored(tmp_path)
    with state:
        state.generation += 1
        failure, _ = update(state)
    assert failure is not None and failure.kind == "generation"


@pytest.mark.parametrize("change", ["numel", "never written"])
def test_wrong_format(tmp_path: Path, change: str) -> None:
    """An extent of another shape, and a place without an extent, are refused."""
    state, _ = stored(tmp_path)
    if change == "numel":
        state.numel -= 1
    else:
        state.place = 1 - state.place
    with state:
        failure, _ = update(state)
    assert failure is not None and failure.kind == "format"


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("missing", [4096, 8192, 1, 513, 5000])
def test_short_file(tmp_path: Path, direct: bool, missing: int) -> None:
    """A file that ends inside an extent is reported as short, also when it ends inside a block."""
    state = StoredState(tmp_path, NUMEL, TASKLET, direct=direct and takes_direct(tmp_path))
    with state:
        state.write(*initial(NUMEL))
        last = state.num_tasklets - 1
        end = state.extent_offset(last, state.place) + extent_bytes(NUMEL - last * TASKLET)
        os.truncate(state.paths[0], end - missing)
        failure, _ = update(state)
    assert failure is not None
    assert (failure.kind, failure.tasklet, failure.errno) == ("short", last, 0)
    assert failure.path == str(state.paths[0])


@pytest.mark.parametrize(
    ("faults", "kinds"),
    [
        ({"flip_read_at": 2}, {"checksum"}),
        ({"misread_at": 2}, {"format", "checksum"}),
        ({"misread_at": 2, "misread_by": 2 * extent_bytes(TASKLET)}, {"foreign"}),
        ({"lose_write_at": 2}, {"format", "generation"}),
    ],
    ids=["flip", "another block", "another extent", "lost write"],
)
def test_a_disk_that_lies(tmp_path: Path, faults: dict[str, int], kinds: set[str]) -> None:
    """Bits that flip, data from elsewhere and writes that were lost are noticed when the extent is read."""
    state, _ = stored(tmp_path)
    with state:
        inject(state.pipeline, seed=1, **faults)
        failure, _ = update(state)
        if "lose_write_at" in faults:
            assert failure is None
            inject(state.pipeline)
            failure = state.work(Operation.READ, [Run(0, NUMEL, arrays=initial(NUMEL))])
    assert failure is not None and failure.kind in kinds, failure


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("which", ["read", "write"])
def test_error_in_the_middle(tmp_path: Path, seed: int, which: str) -> None:
    """EIO with other transfers in flight is reported with errno, and the old place stays intact."""
    state, arrays = stored(tmp_path, num_buffers=3, io_threads=3, compute_threads=2)
    at = {f"fail_{which}_at": seed % state.num_tasklets}
    with state:
        inject(state.pipeline, seed=seed, max_delay_us=500, short_transfer_every=seed % 3, **at)
        failure, _ = update(state)
        assert failure is not None
        assert (failure.kind, failure.errno, failure.path) == ("io", errno.EIO, str(state.paths[0]))
        assert state.pipeline.finish() is None
        assert_same(state.read(), arrays)
        assert update(state)[0] is None


@pytest.mark.parametrize("which", ["read", "write"])
def test_interrupted_transfer(tmp_path: Path, which: str) -> None:
    """A transfer interrupted by EINTR is repeated without a failure."""
    state, _ = stored(tmp_path)
    with state:
        inject(state.pipeline, errno=errno.EINTR, short_transfer_every=2, **{f"fail_{which}_at": 3})
        assert update(state)[0] is None
        state.read()


@pytest.mark.parametrize("seed", range(12))
def test_wait_reports_and_finish_ends(tmp_path: Path, seed: int) -> None:
    """wait() returns a failure once it has occurred. finish() returns it too and allows the next batch."""
    state, arrays = stored(tmp_path, num_buffers=2)
    with state:
        inject(state.pipeline, seed=seed, max_delay_us=300, fail_read_at=3, errno=errno.ENODEV)
        parameter = np.zeros(NUMEL, np.float32)
        runs = [Run(0, NUMEL, 0, normals(51, NUMEL), parameter=parameter)]
        state.start(Operation.UPDATE, runs, [adam_step()])
        waited = state.pipeline.wait()
        assert waited is not None and waited.errno == errno.ENODEV
        again = state.pipeline.wait(0, 1)
        assert again is not None and again.message == waited.message
        with pytest.raises(ValueError, match="active"):
            state.start(Operation.UPDATE, runs, [adam_step()])
        finished = state.pipeline.finish()
        assert finished is not None and finished.message == waited.message
        assert state.pipeline.finish() is None and state.pipeline.wait() is None
        assert_same(state.read(), arrays)


def test_parameters_do_not_wait_for_writes(tmp_path: Path) -> None:
    """A tasklet's parameters are updated although its write fails."""
    state, _ = stored(tmp_path, num_buffers=1)
    with state:
        inject(state.pipeline, fail_write_at=0, errno=errno.ENOSPC)
        failure, parameter = update(state)
    assert failure is not None and (failure.errno, failure.tasklet) == (errno.ENOSPC, 0)
    assert (parameter[:TASKLET] != normals(50, NUMEL)[:TASKLET]).all()
    np.testing.assert_array_equal(parameter[TASKLET:], normals(50, NUMEL)[TASKLET:])


def test_full_disk(tmp_path: Path) -> None:
    """A full device fails the first write with ENOSPC."""
    layout = StoredState(tmp_path, NUMEL, TASKLET)
    identity = Identity(job=JOB, rank=3, state_format=0)
    full = StateFile("/dev/full", direct=False)
    pipeline = Pipeline(files=[full], identity=identity, num_buffers=2, buffer_bytes=layout.extent_bytes)
    pipeline.submit(Batch(Operation.WRITE, layout.tasklets([])))
    failure = pipeline.finish()
    pipeline.close()
    layout.pipeline.close()
    assert failure is not None
    assert (failure.kind, failure.errno, failure.path) == ("io", errno.ENOSPC, "/dev/full")
    assert os.strerror(errno.ENOSPC) in failure.message


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("limit", [5 * 4096, 5 * 4096 + 100])
def test_file_size_limit(tmp_path: Path, limit: int, direct: bool) -> None:
    """A write stopped half-way by the file size limit ends in EFBIG, and its signal does not kill the process.

    The same holds for direct I/O that the limit cuts inside a block.
    """
    direct = direct and takes_direct(tmp_path)
    code = f"""
    import signal, sys
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    from pathlib import Path
    from lightning_smartinfinity.native import Batch, Operation
    from tests.native.stored import StoredState
    import os, resource
    state = StoredState(Path({str(tmp_path)!r}), {TASKLET}, direct={direct})  # its extent: blocks 4 to 7
    os.truncate(state.paths[0], 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    failure = state.work(Operation.WRITE, [])
    state.pipeline.close()
    print(failure.kind, failure.errno)
    """
    paths = [str(Path(core.__file__).parents[2]), str(Path(__file__).parents[2])]
    completed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert completed.returncode != -signal.SIGXFSZ
    assert completed.stdout.split() == ["io", str(errno.EFBIG)], completed.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
