"""Several files behind one pipeline: tasklets that change files, counters of each file, and a slow file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_smartinfinity import native
from lightning_smartinfinity.native import Operation
from tests.helpers.native_testing import Throttle, inject
from tests.native.stored import Run, StoredState
from tests.native.test_pipeline import NUMEL, STEPS, initial, normals, work_two_steps

ENGINES = [name for name, reason in native.io_engines() if reason is None]


def test_failures_name_the_file_at_fault(tmp_path: Path) -> None:
    """A failed read names the file that the tasklet was read from, a failed write the file it was written to."""
    for fault, path in (("fail_read_at", "state-1.bin"), ("fail_write_at", "state-0.bin")):
        with StoredState(tmp_path, 1000, 1000, num_files=2, wanders=True) as state:
            state.write(*initial(1000))
            inject(state.pipeline, **{fault: 0})
            failure = state.work(Operation.UPDATE, [Run(0, 1000, 0, normals(1, 1000))], STEPS)
            assert failure is not None
            assert failure.path.endswith(path) and path in failure.message


def test_bytes_are_counted_by_file(tmp_path: Path) -> None:
    """Each file counts its own reads and writes, and their sums are the pipeline's."""
    with StoredState(tmp_path, 5 * 1024, 1024, num_files=2, wanders=True) as state:
        state.write(*initial(5 * 1024))
        inject(state.pipeline, short_transfer_every=2)
        assert state.work(Operation.UPDATE, [], STEPS) is None
        counters, extent = state.pipeline.counters(), state.extent_bytes
        found = [(file.read_bytes // extent, file.written_bytes // extent) for file in counters.files]
        # The even ones of tasklets 0 .. 4 were written to file 1, then read there and written to file 0.
        assert found == [(2, 2 + 3), (3, 3 + 2)]
        assert sum(file.read_bytes for file in counters.files) == counters.read_bytes
        assert sum(file.written_bytes for file in counters.files) == counters.written_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_throttled_file(tmp_path: Path, engine: str) -> None:
    """A throttled file is busy for its bytes at that rate, simultaneous requests count once, and no bit changes."""
    rate = 20e6
    options = {"num_buffers": 8, "io_engine": engine}
    with StoredState(tmp_path, NUMEL, 2048, num_files=2, options=options) as state:
        throttle = Throttle(state.pipeline, [state.files[1]])
        throttle.bytes_per_second = rate
        start = time.perf_counter()
        work_two_steps(state)
        elapsed = time.perf_counter() - start
        other, slow = state.pipeline.counters().files
        moved = slow.read_bytes + slow.written_bytes
        assert moved > 0
        # The counter reads the clock after the request has, so each request may lose some microseconds.
        assert 0.95 * moved / rate <= slow.busy_seconds <= elapsed
        assert other.busy_seconds <= elapsed
        throttle.bytes_per_second = 0
        work_two_steps(state)
