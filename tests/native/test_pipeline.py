from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.native import (
    Batch,
    DType,
    HostBuffer,
    Identity,
    IoScheduler,
    Operation,
    Pipeline,
    Segment,
    StateFile,
    Tasklet,
    UpdateStep,
)
from tests.helpers.golden import Floats, adagrad_step, adam, adam_step, rmsprop_step, sgd_step
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject
from tests.native.stored import JOB, Run, StoredState, align, extent_bytes
from tests.native.test_update import bitwise

NUMEL = 30_011
STEPS = [adam_step(), adam_step(decay=1.0, l2=0.01, step_size=1e-2), adam_step(one_minus_beta1=0.7)]


def normals(seed: int, numel: int = NUMEL) -> Floats:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def initial(numel: int = NUMEL) -> tuple[Floats, Floats, Floats]:
    return normals(1, numel), normals(2, numel), normals(3, numel) ** 2


def some_runs(gradient: Floats, parameter: Floats, seed: int) -> list[Run]:
    """Return runs of many lengths and steps. Some have no step, and some elements are in no run."""
    random = np.random.default_rng(seed)
    runs, offset = [], 0
    while offset < len(gradient):
        numel = min(int(random.choice([1, 2, 77, 1024, 5000, 13_000])), len(gradient) - offset)
        step = int(random.integers(-1, len(STEPS)))
        if random.integers(0, 5) > 0:
            runs.append(Run(offset, numel, step, gradient[offset:], parameter=parameter[offset:]))
        offset += numel
    return runs


def expected_update(
    state: tuple[Floats, Floats, Floats], gradient: Floats, runs: list[Run]
) -> tuple[Floats, Floats, Floats]:
    master, exp_avg, exp_avg_sq = (array.copy() for array in state)
    for run in runs:
        at = slice(run.offset, run.offset + run.numel)
        if run.step >= 0:
            result = adam(STEPS[run.step], gradient[at], (master[at], exp_avg[at], exp_avg_sq[at]))
            master[at], exp_avg[at], exp_avg_sq[at] = result
    return master, exp_avg, exp_avg_sq


def assert_same(found: tuple[Floats, ...], expected: tuple[Floats, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def work_two_steps(state: StoredState) -> tuple[Floats, ...]:
    """Do two updates, check them against the reference, and return parameters and state."""
    arrays = initial()
    parameter = arrays[0].copy()
    state.write(*arrays)
    for number in range(2):
        gradient = normals(10 + number)
        runs = some_runs(gradient, parameter, seed=number)
        failure = state.work(Operation.UPDATE, runs, STEPS)
        assert failure is None, failure
        arrays = expected_update(arrays, gradient, runs)
        assert_same((parameter,), (arrays[0],))
    found = state.read()
    assert_same(found, arrays)
    return (parameter, *found)


@pytest.mark.parametrize("seed", range(12))
def test_settings_and_interleavings_do_not_change_results(tmp_path: Path, seed: int) -> None:
    """Any tasklets, rings, threads and files give the same bits, with reordered, interrupted and short transfers.

    Segments are any, and some elements are outside of them. In some runs transfers take turns, and in some the two
    places of a tasklet are in different files.
    """
    random = np.random.default_rng(seed)
    num_buffers = int(random.integers(1, 6))
    options = {
        "num_buffers": num_buffers,
        "io_threads": int(random.integers(1, 5)),
        "compute_threads": int(random.integers(1, 4)),
    }
    num_files, tasklet_numel = int(random.integers(1, 4)), (2048, 777, NUMEL, 12_288)[seed % 4]
    scheduler = IoScheduler(in_flight_bytes=4096) if seed % 2 else None
    with StoredState(
        tmp_path, NUMEL, tasklet_numel, num_files=num_files, wanders=seed % 3 > 0, scheduler=scheduler, options=options
    ) as state:
        assert state.pipeline.ring_bytes == num_buffers * state.extent_bytes
        interrupted = {"errno": errno.EINTR, "fail_read_at": 3, "fail_write_at": 5}  # both are repeated
        inject(
            state.pipeline,
            seed=seed,
            max_delay_us=2000,
            short_transfer_every=int(random.integers(1, 4)),
            **interrupted,
        )
        work_two_steps(state)


def test_write_modify_and_read(tmp_path: Path) -> None:
    """WRITE stores the given arrays, and MODIFY replaces them within the segments. READ fills some of them.

    Arrays without an address, and elements in no segment, become zero by WRITE and stay otherwise. READ writes nothing,
    nor does UPDATE of a segment without a step change its parameter.
    """
    master, exp_avg, exp_avg_sq = initial()
    with StoredState(tmp_path, NUMEL, 5000) as state:
        state.write(master, None, exp_avg)
        assert_same(state.read(), (master, np.zeros_like(master), exp_avg))
        runs = [Run(7, 20_000, arrays=(master,)), Run(25_000, 11, arrays=(None, None, exp_avg))]
        assert state.work(Operation.WRITE, runs) is None
        expected = np.zeros((3, NUMEL), np.float32)
        expected[0, 7:20_007] = master[:20_000]
        expected[2, 25_000:25_011] = exp_avg[:11]
        assert_same(state.read(), tuple(expected))
        runs = [Run(0, 3, arrays=(exp_avg_sq,)), Run(4_990, 5_020, arrays=(None, exp_avg))]
        assert state.work(Operation.MODIFY, runs) is None
        expected[0, :3] = exp_avg_sq[:3]
        expected[1, 4_990:10_010] = exp_avg[:5_020]
        before = state.paths[0].read_bytes()
        assert_same(state.read(), tuple(expected))
        out, parameter = np.full(NUMEL, -7, np.float32), np.full(NUMEL, -7, np.float16)
        run = Run(100, 20_000, parameter=parameter, parameter_dtype=DType.FLOAT16, arrays=(None, out))
        assert state.work(Operation.READ, [run]) is None and state.paths[0].read_bytes() == before
        np.testing.assert_array_equal(out[:20_000], expected[1, 100:20_100])
        np.testing.assert_array_equal(parameter[:20_000], expected[0, 100:20_100].astype(np.float16))
        assert (out[20_000:] == -7).all() and (parameter[20_000:] == -7).all()
        out[:] = -7
        assert state.work(Operation.UPDATE, [Run(0, NUMEL, parameter=out)], STEPS) is None
        assert_same(state.read(), tuple(expected))
        assert (out == -7).all()


def test_extent_on_storage(tmp_path: Path) -> None:
    """An extent has the documented layout: zero-padded regions and a little-endian trailer.

    With the master in the parameter, the parameter is updated in place and stored as the master.

    Padding is zero although the buffer held a larger tasklet and the first region was not read.
    """
    numel = 5000 + 1500
    arrays, gradient = initial(numel), normals(8, numel)
    parameter = normals(20, numel)  # not the stored values, to show that the parameter is used
    expected = expected_update((parameter, *arrays[1:]), gradient, [Run(0, numel, 0)])
    region = align(4 * 1500)
    with StoredState(tmp_path, numel, 5000, options={"num_buffers": 1}) as state:
        state.write(*arrays)
        run = Run(0, numel, 0, gradient, parameter=parameter)
        assert state.work(Operation.UPDATE, [run], STEPS, master_in_parameter=True) is None
        assert_same((parameter,), expected[:1])
        assert_same(state.read(), expected)
        extent = state.paths[0].read_bytes()[state.extent_offset(1, state.place) :][: state.extent_bytes_of(1)]
    for number, array in enumerate(expected):
        data = array[5000:].tobytes()
        assert extent[number * region : (number + 1) * region] == data + bytes(region - len(data))
    trailer = extent[-128:]
    assert (extent[3 * region : -128], trailer[:8]) == (bytes(4096 - 128), b"LSIEXT01")
    assert struct.unpack_from("<II16sIIQQQQ", trailer, 8) == (1, 0, JOB, 3, 3, 1, 2, 1500, len(extent))
    checksums = struct.unpack_from("<8I", trailer, 72)
    assert checksums == (*(bitwise(array[5000:].tobytes()) for array in expected), 0, 0, 0, 0, 0)
    assert (trailer[104:124], struct.unpack_from("<I", trailer, 124)) == (bytes(20), (bitwise(trailer[:124]),))


@pytest.mark.parametrize("seed", long_but(range(6), range(12)))
def test_a_batch_in_any_order_that_grows(tmp_path: Path, seed: int) -> None:
    """A batch in any order, extended while it runs, gives the same bits, and each tasklet can be waited for."""
    random = np.random.default_rng(seed)
    gradient, arrays = normals(9), initial()
    parameter = np.full(NUMEL, -7, np.float32)
    expected = adam(STEPS[0], gradient, arrays)
    with StoredState(tmp_path, NUMEL, 2048, options={"num_buffers": 3, "compute_threads": 2}) as state:
        state.write(*arrays)
        inject(state.pipeline, seed=seed, max_delay_us=1000)
        tasklets = state.tasklets([Run(0, NUMEL, 0, gradient, parameter=parameter)])
        order = random.permutation(state.num_tasklets)
        parts = [list(part) for part in np.array_split(order, int(random.integers(1, 6)))]
        for number, part in enumerate(parts):
            batch = Batch(Operation.UPDATE, [tasklets[index] for index in part], STEPS[:1])
            (state.pipeline.extend if number else state.pipeline.submit)(batch)
            begun = order[: sum(map(len, parts[: number + 1]))]
            positions = random.permutation(len(begun))[:3]
            waits_for = begun[positions]
            if random.integers(2):
                waits_for = begun[positions[0] :]
                assert state.pipeline.wait(int(positions[0]), len(begun)) is None
            else:
                assert state.pipeline.wait_for(positions.tolist()) is None
            for index in waits_for:
                at = slice(2048 * int(index), 2048 * (int(index) + 1))
                np.testing.assert_array_equal(parameter[at], expected[0][at])
        assert state.pipeline.finish() is None
        state.generation, state.place = state.generation + 1, 1 - state.place
        assert_same(state.read(), expected)


def test_counters(tmp_path: Path) -> None:
    """Counters give the exact bytes and calls, of each file and of all, also after close()."""
    with StoredState(tmp_path, NUMEL, 5000, num_files=2, wanders=True) as state:
        zero = state.pipeline.counters()
        assert (zero.read_bytes, zero.written_bytes, zero.read_calls, zero.write_calls) == (0, 0, 0, 0)
        state.write(*initial())
        state.read()
        counters = state.pipeline.counters()
        # The even ones of tasklets 0 .. 6, of which the last is small, were written to file 1 and read there.
        of_files = [3 * extent_bytes(5000), 3 * extent_bytes(5000) + extent_bytes(11)]
        assert [(file.read_bytes, file.written_bytes) for file in counters.files] == [(each, each) for each in of_files]
        assert counters.written_bytes == counters.read_bytes == sum(of_files)
        assert (counters.read_calls, counters.write_calls) == (7, 7)
        assert all(file.busy_seconds > 0 for file in counters.files)
        seconds = ("read_seconds", "write_seconds", "compute_seconds", "wait_seconds")
        assert all(getattr(counters, name) > 0 for name in seconds)
        state.pipeline.close()
        assert state.pipeline.counters().read_bytes == sum(of_files)


# ---- resident tasklets

RESIDENT_NUMEL = 3_000
SIZE = 16_384  # bytes of an extent of 1000 elements: three regions of a block each, and the trailer's block


def with_resident(folder: Path, *, through: bool) -> StoredState:
    memory = [] if through else [HostBuffer(SIZE), HostBuffer(SIZE)]
    options = {"resident_bytes": 2 * [SIZE], "resident_through": through, "resident_memory": memory}
    return StoredState(folder, RESIDENT_NUMEL, tasklet_numel=1_000, options=options)


def test_what_has_no_place(tmp_path: Path) -> None:
    """A tasklet that is listed twice, one of another size than its memory, and sizes that no extent has are refused.

    So is an extent larger than the given memory. The active batch continues. The memory of resident tasklets is
    counted apart from the ring.
    """
    with with_resident(tmp_path, through=True) as state:
        assert (state.pipeline.cache_bytes, state.pipeline.ring_bytes) == (2 * SIZE, 2 * SIZE)
        state.write(*initial(RESIDENT_NUMEL))
        found = tuple(np.zeros(RESIDENT_NUMEL, np.float32) for _ in range(3))
        first, second, third = state.tasklets([Run(0, RESIDENT_NUMEL, arrays=found)])
        state.pipeline.submit(Batch(Operation.READ, [first, third]))
        with pytest.raises(ValueError, match="resident tasklet 0 is listed twice"):
            state.pipeline.extend(Batch(Operation.READ, [second, first]))
        state.pipeline.extend(Batch(Operation.READ, [second]))
        assert state.pipeline.finish() is None
        assert_same(found, initial(RESIDENT_NUMEL))
        state.num_arrays = 2
        with pytest.raises(ValueError, match="resident tasklet 1 has another size than its place"):
            state.pipeline.submit(Batch(Operation.WRITE, [state.tasklet(1, [])]))
        for size in (0, 4_095, 2 * SIZE):
            state.options = {"resident_bytes": [size], "resident_memory": [HostBuffer(SIZE)]}
            with pytest.raises(ValueError, match=f"resident extent of {size} bytes"):
                state.open_pipeline()


def test_state_in_memory_only_that_is_not_there(tmp_path: Path) -> None:
    """State that should be in memory only but is missing, or of another generation, is a failure of its generation."""
    with with_resident(tmp_path, through=False) as state:
        failure = state.work(Operation.READ, [])
        assert failure is not None and (failure.kind, failure.errno) == ("generation", 0)
        state.write(*initial(RESIDENT_NUMEL))
        state.generation = 2
        failure = state.work(Operation.READ, [])
        assert failure is not None and failure.kind == "generation"
        state.generation = 1
        counters = state.pipeline.counters()
        assert (counters.write_calls, counters.written_bytes, counters.cached_write_bytes) == (1, SIZE, 2 * SIZE)
        assert_same(state.read(), initial(RESIDENT_NUMEL))


# ---- a whole batch is checked before any of it starts


FEW = 100
MEMORY = np.zeros(FEW, np.float32)
ADDRESS = MEMORY.ctypes.data


def segment(**changes: Any) -> Segment:
    return Segment(**{"offset": 0, "numel": FEW, "step": 0, "gradient": ADDRESS, "parameter": ADDRESS} | changes)


def tasklet(**changes: Any) -> Tasklet:
    values = {
        "index": 5,
        "read_file": 0,
        "write_file": 0,
        "numel": FEW,
        "num_arrays": 3,
        "extent_bytes": extent_bytes(FEW),
        "read_offset": 0,
        "read_generation": 0,
        "write_offset": 4096,
        "write_generation": 1,
        "segments": [segment()],
    }
    return Tasklet(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"numel": 0}, "numel 0 is not in"),
        ({"numel": 1 << 41}, "is not in"),
        ({"num_arrays": 0}, "num_arrays 0 is not in"),
        ({"num_arrays": 9}, "num_arrays 9 is not in"),
        ({"num_arrays": 2, "extent_bytes": extent_bytes(FEW, 2)}, "UPDATE by AdamStep needs 3 arrays"),
        ({"extent_bytes": extent_bytes(FEW) + 4096}, "extent_bytes is 20480, its arrays take 16384"),
        ({"numel": 10_000, "extent_bytes": extent_bytes(10_000)}, "does not fit a buffer of 16384"),
        ({"read_file": 1}, "there is no file 1"),
        ({"write_file": 2}, "there is no file 2"),
        ({"read_offset": 512}, "read_offset 512"),
        ({"write_offset": 4095}, "write_offset 4095"),
        ({"write_offset": 1 << 63}, "write_offset"),
        ({"segments": [segment(offset=1)]}, "leaves its 100 elements"),
        ({"segments": [segment(offset=(1 << 64) - 1, numel=2)]}, "leaves its 100 elements"),
        ({"segments": [segment(numel=51), segment(offset=50, numel=50)]}, "must not overlap"),
        ({"segments": [segment(offset=50, numel=50), segment(numel=50)]}, "ascending order"),
        ({"segments": [segment(step=1)]}, "there is no step 1"),
        ({"segments": [segment(step=-2)]}, "there is no step -2"),
        ({"segments": [segment(gradient=0)]}, "no gradient address"),
        ({"segments": [segment(gradient=ADDRESS + 2)]}, "gradient address is misaligned"),
        ({"segments": [segment(gradient=ADDRESS + 1, gradient_dtype=DType.FLOAT16)]}, "gradient address"),
        ({"segments": [segment(parameter=ADDRESS + 2)]}, "parameter address is misaligned"),
        ({"segments": [segment(arrays=(0, ADDRESS + 2))]}, "array address is misaligned"),
        ({"segments": [segment(arrays=(0, 0, 0, 0))]}, "more arrays than the tasklet"),
        ({"master_in_parameter": True, "segments": [segment(parameter=0)]}, "address of fp32 parameters"),
        (
            {"master_in_parameter": True, "segments": [segment(parameter_dtype=DType.BFLOAT16)]},
            "address of fp32 parameters",
        ),
        ({"master_in_parameter": True, "segments": [segment(numel=99)]}, "cover the whole tasklet"),
    ],
)
def test_bad_tasklet(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    """The error names the tasklet and the value, nothing is started, and a good batch is still accepted."""
    with StoredState(tmp_path, FEW) as state:
        good = tasklet(index=0)
        with pytest.raises(ValueError, match=f"tasklet 5.*{problem}"):
            state.pipeline.submit(Batch(Operation.UPDATE, [good, tasklet(**changes)], [adam_step()]))
        counters = state.pipeline.counters()
        assert (counters.read_calls, counters.write_calls) == (0, 0)
        state.write(None, None, None)


@pytest.mark.parametrize(
    ("state_format", "num_arrays", "operation", "step", "problem"),
    [
        (0, 3, Operation.UPDATE, adagrad_step(), "UPDATE by AdagradStep needs 2 arrays: master and sum"),
        (0, 3, Operation.UPDATE, sgd_step(), "UPDATE by SgdStep needs 2 arrays: master and momentum_buffer"),
        (
            *(0, 3, Operation.UPDATE, rmsprop_step()),
            "UPDATE by RmspropStep needs 4 arrays: master, square_avg, momentum_buffer and grad_avg",
        ),
        (1, 2, Operation.READ, adam_step(), "this state format needs 3 arrays: master, exp_avg and exp_avg_sq"),
        *(
            (state_format, 3, Operation.UPDATE, step, f"for AdamStep only, not for {type(step).__name__}")
            for state_format in (1, 2, 3)
            for step in (adagrad_step(), sgd_step(), rmsprop_step())
        ),
    ],
)
def test_arrays_of_another_rule(
    tmp_path: Path, state_format: int, num_arrays: int, operation: Operation, step: UpdateStep, problem: str
) -> None:
    """The error names the arrays that the rule, or the format, needs. Formats of fewer bits refuse other rules."""
    with StoredState(tmp_path, FEW, identity=Identity(job=JOB, rank=0, state_format=state_format)) as state:
        state.num_arrays = num_arrays
        one = state.tasklet(0, [Run(0, FEW, 0, MEMORY)])
        with pytest.raises(ValueError, match=f"tasklet 0.*{problem}"):
            state.pipeline.submit(Batch(operation, [one], [step]))


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE, Operation.MODIFY])
def test_master_in_parameter_is_for_updates(tmp_path: Path, operation: Operation) -> None:
    """Operations other than UPDATE refuse master_in_parameter."""
    with (
        StoredState(tmp_path, FEW) as state,
        pytest.raises(ValueError, match="UPDATE only"),
    ):
        state.pipeline.submit(Batch(operation, [tasklet(master_in_parameter=True)]))


def test_wait_for_tasklets_that_do_not_exist(tmp_path: Path) -> None:
    """Waiting for tasklets that do not exist is refused, and the batch continues. No tasklets need no wait."""
    with StoredState(tmp_path, FEW) as state:
        state.pipeline.submit(Batch(Operation.WRITE, [tasklet(write_offset=0, segments=[])]))
        for first, last in [(0, 2), (2, None), (1, 0)]:
            with pytest.raises(ValueError, match="wait"):
                state.pipeline.wait(first, last)
        for ask in (state.pipeline.wait_for, state.pipeline.prefer):
            with pytest.raises(ValueError, match="tasklet 1 of 1"):
                ask([0, 1])
        waits = [state.pipeline.wait(1, 1), state.pipeline.wait_for([]), state.pipeline.wait_for([0, 0])]
        assert [*waits, state.pipeline.finish()] == 4 * [None]


def test_extend_asks_for_an_active_batch_of_the_same_operation(tmp_path: Path) -> None:
    """extend() without a batch, or with another operation or a bad tasklet, is refused, and the batch continues."""
    more = Batch(Operation.WRITE, [tasklet(write_offset=0, segments=[])])
    with StoredState(tmp_path, FEW) as state:
        with pytest.raises(ValueError, match="no batch is active"):
            state.pipeline.extend(more)
        state.pipeline.submit(Batch(Operation.WRITE, []))
        with pytest.raises(ValueError, match="same operation"):
            state.pipeline.extend(Batch(Operation.READ, [tasklet(segments=[])]))
        with pytest.raises(ValueError, match="numel"):
            state.pipeline.extend(Batch(Operation.WRITE, [tasklet(numel=0, segments=[])]))
        state.pipeline.extend(more)
        assert state.pipeline.wait() is None and state.pipeline.finish() is None
        assert state.pipeline.counters().write_calls == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"files": []}, "at least one file"),
        ({"num_buffers": 0}, "num_buffers"),
        ({"buffer_bytes": 0}, "buffer_bytes"),
        ({"buffer_bytes": 4096}, "buffer_bytes"),
        ({"buffer_bytes": 10_000}, "buffer_bytes"),
        ({"io_threads": 0}, "io_threads"),
        ({"compute_threads": 0}, "compute_threads"),
        ({"identity": Identity(job=JOB, rank=0, state_format=4)}, "there is no state format 4"),
        pytest.param({"num_buffers": 4096, "buffer_bytes": 1 << 40}, "mmap", id="a ring that cannot be mapped"),
    ],
)
def test_bad_pipeline(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    """The error names the argument. A ring that cannot be mapped does not kill the process."""
    path = tmp_path / "file"
    path.touch()
    values = {
        "files": [StateFile(str(path), direct=False)],
        "identity": Identity(job=JOB, rank=0, state_format=0),
        "num_buffers": 1,
        "buffer_bytes": 8192,
    }
    with pytest.raises(OSError if problem == "mmap" else ValueError, match=problem):
        Pipeline(**{**values, **changes})


def test_bad_values() -> None:
    """A job id needs 16 bytes, a buffer at least one byte, and a segment at most eight arrays."""
    for make, problem in (
        (lambda: Identity(job=bytes(15), rank=0, state_format=0), "15 bytes"),
        (lambda: HostBuffer(0), "0 bytes"),
        (lambda: Segment(offset=0, numel=1, arrays=(0,) * 9), "8 arrays"),
    ):
        with pytest.raises(ValueError, match=problem):
            make()
