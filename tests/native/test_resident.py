"""Resident tasklets of a pipeline: refused batches and stale state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import Batch, Operation
from tests.native.stored import Run, StoredState

NUMEL = 3_000
SIZE = 16_384  # bytes of an extent of 1000 elements: three regions of a block each, and the trailer's block


def stored(folder: Path, *, num_resident: int = 2, through: bool = True) -> StoredState:
    options = {"resident_bytes": [SIZE] * num_resident, "resident_through": through}
    return StoredState(folder, NUMEL, tasklet_numel=1_000, options=options)


def arrays(seed: int) -> tuple[np.ndarray, ...]:
    return tuple(np.random.default_rng((seed, k)).random(NUMEL, np.float32) for k in range(3))


@pytest.mark.parametrize("size", [0, 4_095])
def test_a_size_that_no_extent_has(tmp_path: Path, size: int) -> None:
    """It is refused. The memory of resident tasklets is counted apart from the ring, and there is none by default."""
    with stored(tmp_path) as state:
        assert (state.pipeline.cache_bytes, state.pipeline.ring_bytes) == (2 * SIZE, 2 * SIZE)
        state.options = {"resident_bytes": [size]}
        with pytest.raises(ValueError, match=f"resident extent of {size} bytes"):
            state.open_pipeline()
        state.options = {}
        assert state.open_pipeline().cache_bytes == 0


def test_a_tasklet_of_another_size(tmp_path: Path) -> None:
    """A resident tasklet with another size than its memory is refused."""
    with stored(tmp_path) as state:
        state.num_arrays = 2
        large = state.tasklet(1, [])
        with pytest.raises(ValueError, match="resident tasklet 1 has another size than its place"):
            state.pipeline.submit(Batch(Operation.WRITE, [large]))


def test_a_tasklet_twice_in_a_batch(tmp_path: Path) -> None:
    """A resident tasklet listed twice is refused, in submit() and extend(), and the active batch continues."""
    with stored(tmp_path) as state:
        state.write(*arrays(1))
        found = tuple(np.zeros(NUMEL, np.float32) for _ in range(3))
        first, second, third = state.tasklets([Run(0, NUMEL, arrays=found)])
        with pytest.raises(ValueError, match="resident tasklet 0 is listed twice"):
            state.pipeline.submit(Batch(Operation.READ, [first, third, first]))
        state.pipeline.submit(Batch(Operation.READ, [first, third]))
        with pytest.raises(ValueError, match="resident tasklet 0 is listed twice"):
            state.pipeline.extend(Batch(Operation.READ, [second, first]))
        state.pipeline.extend(Batch(Operation.READ, [second]))
        assert state.pipeline.finish() is None
        for one, other in zip(found, arrays(1), strict=True):
            assert np.array_equal(one, other)


def test_another_generation_is_read_from_storage(tmp_path: Path) -> None:
    """Resident state of another generation is ignored: the tasklet is read from storage.

    An uncommitted batch leaves such a generation in memory.
    """
    with stored(tmp_path) as state:
        state.write(*arrays(1))
        state.start(Operation.WRITE, [Run(0, NUMEL, arrays=arrays(2))])
        assert state.pipeline.finish() is None  # and the batch is not committed
        reads = state.pipeline.counters().read_calls
        for expected_reads in (3, 1):
            for one, other in zip(state.read(), arrays(1), strict=True):
                assert np.array_equal(one, other)
            reads += expected_reads
            assert state.pipeline.counters().read_calls == reads


def test_state_in_memory_only_that_is_not_there(tmp_path: Path) -> None:
    """State that should be in memory only but is missing is a failure of its generation."""
    with stored(tmp_path, through=False) as state:
        failure = state.work(Operation.READ, [])
        assert failure is not None
        assert (failure.kind, failure.errno) == ("generation", 0)
        state.write(*arrays(1))
        state.generation += 1
        failure = state.work(Operation.READ, [])
        assert failure is not None
        assert failure.kind == "generation"
        state.generation -= 1
        counters = state.pipeline.counters()
        assert (counters.write_calls, counters.written_bytes, counters.cached_write_bytes) == (1, SIZE, 2 * SIZE)
        for one, other in zip(state.read(), arrays(1), strict=True):
            assert np.array_equal(one, other)
        assert state.pipeline.counters().cached_read_bytes == 2 * SIZE
