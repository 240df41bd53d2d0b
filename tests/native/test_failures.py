"""A failure on storage stops the batch, is reported with path and offset, and leaves the old place intact."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import Failure, Identity, Operation
from tests.helpers.native_testing import inject
from tests.helpers.update_rules import Floats, adam_step
from tests.native.builds import run_python
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
    """One flipped bit anywhere in the data read is reported with file, offset and tasklet, whose parameters stay."""
    state, _ = stored(tmp_path)
    with state:
        flip(state, tasklet=4, position=position)
        failure, parameter = update(state)
    assert failure is not None
    assert (failure.kind, failure.tasklet, failure.errno) == (kind, 4, 0)
    its_own = slice(4 * TASKLET, 5 * TASKLET)
    np.testing.assert_array_equal(parameter[its_own], normals(50, NUMEL)[its_own])
    assert failure.path == str(state.paths[0])
    assert failure.offset == state.extent_offset(4, state.place)
    assert failure.path in failure.message and str(failure.offset) in failure.message


def test_master_in_parameter_does_not_read_the_master(tmp_path: Path) -> None:
    """With the master in the parameter, a flipped bit in the stored master does not matter. One in a moment does."""
    state, _ = stored(tmp_path)
    with state:
        flip(state, tasklet=2, position=5)
        assert update(state, master_in_parameter=True)[0] is None
        flip(state, tasklet=2, position=REGION + 5)
        failure, _ = update(state, master_in_parameter=True)
    assert failure is not None and failure.kind == "checksum"


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


@pytest.mark.parametrize("which", ["read", "write"])
def test_interrupted_transfer(tmp_path: Path, which: str) -> None:
    """A transfer interrupted by EINTR is repeated without a failure."""
    state, _ = stored(tmp_path)
    with state:
        inject(state.pipeline, errno=errno.EINTR, short_transfer_every=2, **{f"fail_{which}_at": 3})
        assert update(state)[0] is None
        state.read()


@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize(("direct", "limit"), [(False, 5 * 4096), (True, 5 * 4096 + 100)])
def test_file_size_limit(tmp_path: Path, limit: int, direct: bool) -> None:
    """A write stopped half-way by the file size limit ends in EFBIG, and its signal does not kill the process.

    The same holds for direct I/O that the limit cuts inside a block.
    """
    direct = direct and takes_direct(tmp_path)
    code = f"""
    import signal, sys
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    from pathlib import Path
    from lightning_smartinfinity.native import Operation
    from tests.native.stored import StoredState
    import os, resource
    state = StoredState(Path({str(tmp_path)!r}), {TASKLET}, direct={direct})  # its extent: blocks 4 to 7
    os.truncate(state.paths[0], 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    failure = state.work(Operation.WRITE, [])
    state.pipeline.close()
    print(failure.kind, failure.errno)
    """
    assert run_python(code).split() == ["io", str(errno.EFBIG)]
