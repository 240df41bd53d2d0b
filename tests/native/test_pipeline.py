from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import Batch, DType, IoScheduler, Operation
from tests.helpers.native_testing import inject
from tests.helpers.update_rules import Floats, adam, adam_step
from tests.native.stored import JOB, Run, StoredState, align, extent_bytes
from tests.native.test_crc32c import bitwise

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


@pytest.mark.parametrize(("tasklet_numel", "num_buffers"), [(NUMEL, 1), (1024, 2), (5000, 5), (12_288, 1), (777, 2)])
def test_tasklets_and_ring_do_not_change_results(tmp_path: Path, tasklet_numel: int, num_buffers: int) -> None:
    """Any tasklet and ring size gives the same bits, with any segments and with elements outside of segments."""
    options = {"num_buffers": num_buffers}
    with StoredState(tmp_path, NUMEL, tasklet_numel, options=options) as state:
        assert state.pipeline.ring_bytes == num_buffers * state.extent_bytes
        work_two_steps(state)


@pytest.mark.parametrize("seed", range(12))
def test_interleavings_do_not_change_results(tmp_path: Path, seed: int) -> None:
    """Any number of threads and files gives the same bits, with reordered and short transfers that take turns.

    In some runs the two places of a tasklet are in different files.
    """
    random = np.random.default_rng(seed)
    options = {
        "num_buffers": int(random.integers(2, 6)),
        "io_threads": int(random.integers(1, 5)),
        "compute_threads": int(random.integers(1, 4)),
        "buffer_bytes": 1 << int(random.integers(16, 21)),  # larger than the extent
    }
    num_files = int(random.integers(1, 4))
    scheduler = IoScheduler(in_flight_bytes=4096) if seed % 2 else None
    state = StoredState(
        tmp_path, NUMEL, 2048, num_files=num_files, wanders=seed % 3 > 0, scheduler=scheduler, options=options
    )
    with state:
        inject(state.pipeline, seed=seed, max_delay_us=2000, short_transfer_every=int(random.integers(1, 4)))
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
        assert state.work(Operation.READ, [run]) is None
        assert state.paths[0].read_bytes() == before
        np.testing.assert_array_equal(out[:20_000], expected[1, 100:20_100])
        np.testing.assert_array_equal(parameter[:20_000], expected[0, 100:20_100].astype(np.float16))
        assert (out[20_000:] == -7).all() and (parameter[20_000:] == -7).all()
        out[:] = -7
        assert state.work(Operation.UPDATE, [Run(0, NUMEL, parameter=out)], STEPS) is None
        assert_same(state.read(), tuple(expected))
        assert (out == -7).all()


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.MODIFY])
def test_master_from_parameter(tmp_path: Path, operation: Operation) -> None:
    """The master is taken from its array, or else widened from the parameter, which is never written."""
    parameter = normals(5).astype(np.float16)
    before = parameter.copy()
    master = normals(6)
    with StoredState(tmp_path, NUMEL, 5000) as state:
        state.write(*initial())
        runs = [
            Run(0, 9_000, parameter=parameter, parameter_dtype=DType.FLOAT16),
            Run(9_000, 100, parameter=parameter[9_000:], parameter_dtype=DType.FLOAT16, arrays=(master[9_000:],)),
        ]
        assert state.work(operation, runs) is None
        found = state.read()[0]
    np.testing.assert_array_equal(found[:9_000], parameter[:9_000].astype(np.float32))
    np.testing.assert_array_equal(found[9_000:9_100], master[9_000:9_100])
    np.testing.assert_array_equal(parameter, before)


def test_master_in_parameter(tmp_path: Path) -> None:
    """The parameter is updated in place and stored as the master. The stored master is not read."""
    arrays = initial()
    parameter = normals(20)  # not the stored values, to show that the parameter is used
    gradient = normals(30)
    cuts = [0, 1, 4000, 4001, 5000, 17_000, NUMEL]
    runs = [
        Run(first, last - first, number % 4 - 1, gradient[first:], parameter=parameter[first:])
        for number, (first, last) in enumerate(itertools.pairwise(cuts))
    ]
    expected = expected_update((parameter.copy(), *arrays[1:]), gradient, runs)
    with StoredState(tmp_path, NUMEL, 5000) as state:
        state.write(*arrays)
        before = state.pipeline.counters()
        assert state.work(Operation.UPDATE, runs, STEPS, master_in_parameter=True) is None
        after = state.pipeline.counters()
        assert_same((parameter,), (expected[0],))
        assert_same(state.read(), expected)
        extents = [extent_bytes(min(5000, NUMEL - offset)) for offset in range(0, NUMEL, 5000)]
        masters = [align(4 * min(5000, NUMEL - offset)) for offset in range(0, NUMEL, 5000)]
    assert after.read_bytes - before.read_bytes == sum(extents) - sum(masters)
    assert after.written_bytes - before.written_bytes == sum(extents)


def test_extent_on_storage(tmp_path: Path) -> None:
    """An extent has the documented layout: zero-padded regions and a little-endian trailer."""
    numel = 1500
    arrays = initial(numel)
    region = align(4 * numel)
    with StoredState(tmp_path, numel) as state:
        state.write(*arrays)
        extent = state.paths[0].read_bytes()[state.extent_offset(0, 1) :][: state.extent_bytes]
    for number, array in enumerate(arrays):
        data = array.tobytes()
        assert extent[number * region : (number + 1) * region] == data + bytes(region - len(data))
    trailer = extent[-128:]
    assert extent[3 * region : -128] == bytes(4096 - 128)
    assert trailer[:8] == b"LSIEXT01"
    assert struct.unpack_from("<II16sIIQQQQ", trailer, 8) == (1, 0, JOB, 3, 3, 0, 1, numel, len(extent))
    checksums = struct.unpack_from("<8I", trailer, 72)
    assert checksums == (*(bitwise(array.tobytes()) for array in arrays), 0, 0, 0, 0, 0)
    assert trailer[104:124] == bytes(20)
    assert struct.unpack_from("<I", trailer, 124) == (bitwise(trailer[:124]),)


def test_no_memory_leaks_into_padding(tmp_path: Path) -> None:
    """Padding is zero even if the buffer held another tasklet or the region was not read."""
    parameter, gradient = normals(7), normals(8)
    with StoredState(tmp_path, NUMEL, 5000, options={"num_buffers": 1}) as state:
        state.write(*initial())
        run = Run(0, NUMEL, 0, gradient, parameter=parameter)
        assert state.work(Operation.UPDATE, [run], STEPS, master_in_parameter=True) is None
        content = state.paths[0].read_bytes()
    region = align(4 * 11)  # the last tasklet, whose buffer was full of an earlier tasklet
    last = content[state.extent_offset(6, 0) :][: extent_bytes(11)]
    for number in range(3):
        assert last[number * region + 44 : (number + 1) * region] == bytes(region - 44)


@pytest.mark.parametrize("seed", range(6))
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


def test_only_listed_tasklets_can_be_preferred(tmp_path: Path) -> None:
    """A number beyond the batch is refused. Without a batch prefer() does nothing."""
    with StoredState(tmp_path, NUMEL, 2048) as state:
        state.pipeline.prefer([99])
        inject(state.pipeline, seed=1, max_delay_us=20_000)
        state.pipeline.submit(Batch(Operation.WRITE, state.tasklets([])))
        with pytest.raises(ValueError, match=f"tasklet 99 of {state.num_tasklets}"):
            state.pipeline.prefer([0, 99])
        assert state.pipeline.finish() is None


def test_counters(tmp_path: Path) -> None:
    """Counters give the exact bytes and calls, also after close()."""
    with StoredState(tmp_path, NUMEL, 5000) as state:
        zero = state.pipeline.counters()
        assert (zero.read_bytes, zero.written_bytes, zero.read_calls, zero.write_calls) == (0, 0, 0, 0)
        state.write(*initial())
        state.read()
        counters = state.pipeline.counters()
        total = 6 * extent_bytes(5000) + extent_bytes(11)
        assert (counters.written_bytes, counters.read_bytes) == (total, total)
        assert (counters.read_calls, counters.write_calls) == (7, 7)
        seconds = ("read_seconds", "write_seconds", "compute_seconds", "wait_seconds")
        assert all(getattr(counters, name) > 0 for name in seconds)
        state.pipeline.close()
        assert state.pipeline.counters().read_bytes == total


def test_empty_batch(tmp_path: Path) -> None:
    """A batch without tasklets is finished at once. Without a batch wait() and finish() return at once."""
    with StoredState(tmp_path, 10) as state:
        assert state.pipeline.wait() is None
        assert state.pipeline.finish() is None
        state.num_files = 1
        state.tasklet_numel = 10
        state.numel = 0
        assert state.work(Operation.UPDATE, []) is None
