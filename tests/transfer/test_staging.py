"""The staging buffer for partitions outside host memory: its contents, its size and its reuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.transfer.staging import StagingBuffer, TensorPartition
from lightning_smartinfinity.transfer.tensors import native_dtype
from tests.helpers.native_testing import inject
from tests.transfer.harness import Case, Run, assert_equal, layout_of, running

# There are several waves, so that each half of the buffer is used again.
SMALL_RING = Case(staged=True, num_buffers=2, shapes=((60_000, 0, 0, 0), (3, 0, 1, 0), (50_000, 3, 1, 1)))


class LatePartition(TensorPartition):
    """A partition that copies as late as its contract allows, namely when it is waited for."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._late: list[Callable[[], None]] = []

    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        put = super().put
        self._late.append(lambda: put(sub_group, offset, values))

    def get(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        get = super().get
        self._late.append(lambda: get(sub_group, offset, values))

    def synchronize(self) -> None:
        for copy in self._late:
            copy()
        self._late.clear()


class LateRun(Run):
    """A run whose partition is a :class:`LatePartition`."""

    def outputs(self) -> LatePartition:
        return LatePartition(self.partition)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staging_is_not_overwritten_before_it_was_copied(tmp_path: Path, dtype: torch.dtype) -> None:
    """Copies delayed until they are waited for give the bits of an unstaged partition, with rollback too."""
    case = SMALL_RING.but(dtype=dtype)
    with running(tmp_path / "direct", case.but(staged=False)) as run:
        run.steps(range(3))
        expected = run.state()
    run = LateRun(tmp_path / "late", case)
    run.step(0)
    before = run.state()
    run.handler.begin_step(run.collect(3))
    run.handler.step.wait(slice(0, 1))
    run.handler.roll_back()
    assert_equal(run.state(), before)
    run.steps(range(1, 3))
    assert_equal(run.state(), expected)
    run.close()


def test_failure_between_waves(tmp_path: Path) -> None:
    """If a wave fails, the parameters of earlier waves are rolled back as well."""
    with running(tmp_path, SMALL_RING) as run:
        before, plan = run.state(), run.collect(1)
        inject(run.device.pipeline, fail_write_at=7)
        run.handler.begin_step(plan)
        with pytest.raises(StorageError, match="tasklet"):
            run.handler.step.wait()
        assert not torch.equal(torch.cat(run.partition), before["partition"])
        run.handler.roll_back()
        assert_equal(run.state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("nbytes", [0, 90_000, 1 << 30])
def test_buffer_is_bounded(dtype: torch.dtype, nbytes: int) -> None:
    """The buffer holds at most the allowed bytes or the partition twice, and at least a tasklet in each half."""
    layout = layout_of(Case())
    buffer = StagingBuffer(layout, dtype=native_dtype(dtype), nbytes=nbytes)
    tasklet_bytes = layout.extents.tasklet_numel * dtype.itemsize
    assert buffer.nbytes == 2 * buffer.tasklets_per_wave * tasklet_bytes
    assert 1 <= buffer.tasklets_per_wave <= len(layout.tasklets)
    assert buffer.nbytes <= max(nbytes, 2 * tasklet_bytes)
    halves = [buffer.half(index).data_ptr() for index in range(3)]
    assert halves[0] == halves[2] != halves[1]


def test_masters_in_fp32_come_from_storage_not_from_the_partition(tmp_path: Path) -> None:
    """The master of staged fp32 parameters is on storage. The partition is overwritten and never read."""
    with running(tmp_path, SMALL_RING) as run:
        master = run.state()["master"]
        for tensor in run.partition:
            tensor.fill_(torch.nan)
        run.handler.begin_step(run.collect(1))
        run.handler.roll_back()
        active = torch.cat([run.slice(i) for i in range(len(run.parameters)) if (i + 1) % 3])
        assert not active.isnan().any()
        torch.testing.assert_close(run.state()["master"], master, rtol=0, atol=0)
