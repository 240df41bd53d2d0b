"""A whole batch is checked before any of it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.native import (
    Batch,
    DType,
    HostBuffer,
    Identity,
    Operation,
    Pipeline,
    Segment,
    StateFile,
    Tasklet,
    UpdateStep,
)
from tests.helpers.golden import adagrad_step, adam_step, rmsprop_step, sgd_step
from tests.native.stored import JOB, Run, StoredState, extent_bytes

NUMEL = 100
MEMORY = np.zeros(NUMEL, np.float32)
ADDRESS = MEMORY.ctypes.data


def segment(**changes: Any) -> Segment:
    values = {"offset": 0, "numel": NUMEL, "step": 0, "gradient": ADDRESS, "parameter": ADDRESS}
    return Segment(**{**values, **changes})


def tasklet(**changes: Any) -> Tasklet:
    values = {
        "index": 5,
        "read_file": 0,
        "write_file": 0,
        "numel": NUMEL,
        "num_arrays": 3,
        "extent_bytes": extent_bytes(NUMEL),
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
        ({"num_arrays": 2, "extent_bytes": extent_bytes(NUMEL, 2)}, "UPDATE by AdamStep needs 3 arrays"),
        ({"extent_bytes": extent_bytes(NUMEL) + 4096}, "extent_bytes is 20480, its arrays take 16384"),
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
    with StoredState(tmp_path, NUMEL) as state:
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
    identity = Identity(job=JOB, rank=0, state_format=state_format)
    with StoredState(tmp_path, NUMEL, identity=identity) as state:
        state.num_arrays = num_arrays
        one = state.tasklet(0, [Run(0, NUMEL, 0, MEMORY)])
        with pytest.raises(ValueError, match=f"tasklet 0.*{problem}"):
            state.pipeline.submit(Batch(operation, [one], [step]))


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE, Operation.MODIFY])
def test_master_in_parameter_is_for_updates(tmp_path: Path, operation: Operation) -> None:
    """Operations other than UPDATE refuse master_in_parameter."""
    with (
        StoredState(tmp_path, NUMEL) as state,
        pytest.raises(ValueError, match="UPDATE only"),
    ):
        state.pipeline.submit(Batch(operation, [tasklet(master_in_parameter=True)]))


def test_wait_for_tasklets_that_do_not_exist(tmp_path: Path) -> None:
    """Waiting for tasklets that do not exist is refused, and the batch continues. No tasklets need no wait."""
    with StoredState(tmp_path, NUMEL) as state:
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
    with StoredState(tmp_path, NUMEL) as state:
        with pytest.raises(ValueError, match="no batch is active"):
            state.pipeline.extend(more)
        state.pipeline.submit(Batch(Operation.WRITE, []))
        with pytest.raises(ValueError, match="same operation"):
            state.pipeline.extend(Batch(Operation.READ, [tasklet(segments=[])]))
        with pytest.raises(ValueError, match="numel"):
            state.pipeline.extend(Batch(Operation.WRITE, [tasklet(numel=0, segments=[])]))
        state.pipeline.extend(more)
        assert state.pipeline.wait() is None
        assert state.pipeline.finish() is None
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
