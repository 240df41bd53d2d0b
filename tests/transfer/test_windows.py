"""The whole state read and replaced window by window, within the ring's memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.transfer.windows import Window, WindowBuffer
from tests.helpers.native_testing import inject
from tests.transfer.harness import Case, Run, assert_equal, running

CASES = [
    Case(),
    Case(num_buffers=16),
    Case(tasklet_bytes=1 << 20, num_buffers=2),
    Case(tasklet_bytes=100_000, num_buffers=9, num_devices=3),
    Case(durability="none", num_devices=2),
]
IDS = ["one-tasklet-windows", "one-window", "one-tasklet", "three-devices", "one-slot"]


def scanned(run: Run) -> list[np.ndarray]:
    """The three arrays as scan hands them over."""
    arrays = [np.full(run.layout.numel, np.nan, np.float32) for _ in range(3)]

    def keep(window: Window) -> None:
        for array, values in zip(arrays, window.arrays, strict=True):
            array[window.begin : window.end] = values

    run.handler.scan(keep)
    return arrays


def from_arrays(arrays: list[np.ndarray]) -> Callable[[Window], None]:
    """Fills windows with these."""

    def fill(window: Window) -> None:
        for array, values in zip(arrays, window.arrays, strict=True):
            values[:] = array[window.begin : window.end]

    return fill


def random_arrays(run: Run) -> list[np.ndarray]:
    return [np.random.default_rng(k).standard_normal(run.layout.numel, np.float32) for k in range(3)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_scan_hands_over_what_single_parameters_hold(tmp_path: Path, case: Case) -> None:
    """Every array of every parameter comes out to the bit, whatever the tasklets, the ring and the devices."""
    with running(tmp_path, case) as run:
        run.steps(range(2))
        arrays = scanned(run)
        for index, where in enumerate(run.layout.parameters):
            values = run.handler.read_parameter(index)
            for name, array in zip(("master", "exp_avg", "exp_avg_sq"), arrays, strict=True):
                found = array[where.offset : where.offset + where.real_numel]
                assert found.tobytes() == values[name].tobytes(), (index, name)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_replaced_state_is_found_again(tmp_path: Path, case: Case) -> None:
    """What replace was filled with is the next generation, padding too, and training goes on from it."""
    with running(tmp_path, case) as run:
        run.step(1)
        arrays, steps = random_arrays(run), np.arange(len(run.layout.parameters)) + 4
        run.handler.replace(from_arrays(arrays), steps=steps)
        assert run.handler.generation == 2
        assert run.handler.steps.tolist() == steps.tolist()
        for found, array in zip(scanned(run), arrays, strict=True):
            assert found.tobytes() == array.tobytes()
        run.step(2)
        assert run.handler.generation == 3


@pytest.mark.parametrize("durability", ["none", "step"])
def test_state_of_another_store_goes_on_from_there(tmp_path: Path, durability: str) -> None:
    """A checkpoint's arrays and step counts become the state of another store, which goes on from them alike."""
    with running(tmp_path / "first", Case()) as run:
        run.steps(range(2))
        saved, arrays = run.state(), scanned(run)
        run.step(2)
        expected = run.state()
    with running(tmp_path / "second", Case(tasklet_bytes=100_000, durability=durability)) as run:
        run.handler.replace(from_arrays(arrays), steps=saved["steps"].numpy())
        masters = torch.from_numpy(arrays[0])
        for tensor, values in zip(run.partition, masters.split([t.numel() for t in run.partition]), strict=True):
            tensor.copy_(values)
        assert run.handler.generation == 1
        assert_equal(run.state(), saved)
        run.step(2)
        assert_equal(run.state(), expected)


def test_transfers_that_overtake_each_other(tmp_path: Path) -> None:
    """Late and short transfers leave no byte of one window in another."""
    with running(tmp_path, Case(num_buffers=8, num_devices=2)) as run:
        arrays = random_arrays(run)
        inject(run.device.pipeline, seed=3, max_delay_us=400, short_transfer_every=3)
        run.handler.replace(from_arrays(arrays), steps=run.handler.steps)
        for found, array in zip(scanned(run), arrays, strict=True):
            assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_windows_are_whole_tasklets_in_order_within_the_ring(tmp_path: Path, case: Case) -> None:
    """Windows cover the partition once; both halves together take no more than the ring, or than two tasklets."""
    with running(tmp_path, case) as run:
        windows: list[tuple[int, int, int]] = []
        run.handler.scan(lambda w: windows.append((w.begin, w.end, sum(a.nbytes for a in w.arrays))))
        numel, tasklet_numel = run.layout.numel, run.layout.extents.tasklet_numel
        assert [begin for begin, _, _ in windows] == [0, *(end for _, end, _ in windows[:-1])]
        assert windows[-1][1] == numel
        assert all(begin % tasklet_numel == 0 for begin, _, _ in windows)
        limit = max(run.device.ring_bytes, 2 * 12 * tasklet_numel)
        assert 2 * max(nbytes for _, _, nbytes in windows) <= limit
        assert WindowBuffer(run.layout, nbytes=run.device.ring_bytes).nbytes <= limit


def test_fill_that_raises_changes_nothing(tmp_path: Path) -> None:
    """The previous generation stays current, to the bit, and the next step finds a free device."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        run.step(1)
        before, calls = run.state(), []

        def fill(window: Window) -> None:
            calls.append(window.begin)
            window.arrays[0].fill(7)
            if len(calls) == 4:
                raise KeyError("gone")

        with pytest.raises(KeyError, match="gone"):
            run.handler.replace(fill, steps=run.handler.steps + 1)
        assert_equal(run.state(), before)
        assert run.handler.generation == 1
        run.step(2)


def test_visit_that_raises_leaves_the_device_free(tmp_path: Path) -> None:
    """The window that is being read is waited for before its memory goes."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        inject(run.device.pipeline, max_delay_us=2000)
        with pytest.raises(ZeroDivisionError):
            run.handler.scan(lambda window: 1 // 0)
        run.step(1)


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"fail_write_at": 0, "errno": errno.ENOSPC}, StorageFullError),
        ({"fail_write_at": 4, "errno": errno.EIO}, StorageError),
    ],
    ids=["full", "write-error"],
)
def test_write_error_in_replace_changes_nothing(
    tmp_path: Path, faults: dict[str, int], kind: type[StorageError]
) -> None:
    """The error names the file; the previous generation stays; the second try succeeds."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        run.step(1)
        before, arrays = run.state(), random_arrays(run)
        inject(run.device.pipeline, **faults)
        with pytest.raises(kind, match=r"state\.bin"):
            run.handler.replace(from_arrays(arrays), steps=run.handler.steps)
        assert_equal(run.state(), before)
        run.handler.replace(from_arrays(arrays), steps=run.handler.steps)
        assert scanned(run)[0].tobytes() == arrays[0].tobytes()


def test_read_error_in_scan_is_reported(tmp_path: Path) -> None:
    """Scan raises what the device says; a second scan reads everything."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        expected = run.state()["master"]
        inject(run.device.pipeline, fail_read_at=3)
        with pytest.raises(StorageError, match=r"state\.bin"):
            scanned(run)
        assert torch.equal(torch.from_numpy(scanned(run)[0]), expected)


def test_failure_elsewhere_keeps_the_commit_back(tmp_path: Path) -> None:
    """The agreement ends after the last write and before the commit: if it raises, nothing is committed."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        run.step(1)
        before, written = run.state(), []

        @contextmanager
        def other_rank_failed() -> Iterator[None]:
            num_writes = run.handler.traffic().write_calls
            yield
            written.append(run.handler.traffic().write_calls - num_writes)
            raise StorageError("Rank 1 failed.", "Mend it.")

        with pytest.raises(StorageError, match="Rank 1"):
            run.handler.replace(from_arrays(random_arrays(run)), steps=run.handler.steps, together=other_rank_failed)
        assert written == [run.layout.extents.num_tasklets]
        assert_equal(run.state(), before)


@pytest.mark.parametrize("shapes", [(), ((0, 0, 0, 0),)], ids=["none", "empty"])
def test_partitions_of_nothing(tmp_path: Path, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    """A rank without elements visits and fills nothing, and still commits its generation."""
    with running(tmp_path, Case(shapes=shapes)) as run:
        windows: list[Window] = []
        run.handler.scan(windows.append)
        run.handler.replace(windows.append, steps=run.handler.steps + 3)
        assert windows == []
        assert run.handler.generation == 1
        assert run.handler.steps.tolist() == [3] * len(shapes)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_run_of_the_partition_is_read_and_modified(tmp_path: Path, case: Case) -> None:
    """Any run of elements: its master is replaced as one generation, and nothing else; training goes on from it."""
    with running(tmp_path, case) as run:
        run.steps(range(2))
        before, generation = scanned(run), run.handler.generation
        begin, end = run.layout.numel // 5, run.layout.numel // 2 + 7
        read = run.handler.read_range(begin, end, names=["master", "exp_avg_sq"])
        assert [read[name].tobytes() for name in read] == [before[i][begin:end].tobytes() for i in (0, 2)]
        run.handler.modify_range(begin, {"master": read["master"] + 1})
        before[0][begin:end] += 1
        assert run.handler.generation == generation + 1
        assert [array.tobytes() for array in scanned(run)] == [array.tobytes() for array in before]
        run.step(2)


def test_a_run_that_fails_elsewhere_is_not_modified(tmp_path: Path) -> None:
    """If another rank could not write its run, the previous generation stays current here."""

    @contextmanager
    def failing_elsewhere() -> Iterator[None]:
        yield
        raise StorageError("Another rank failed.", "None.")

    with running(tmp_path, Case()) as run:
        before = scanned(run)
        for modify in (
            lambda together: run.handler.modify_range(0, {"master": np.zeros(500, np.float32)}, together=together),
            lambda together: run.handler.modify(
                {0: {"master": np.zeros(run.layout.parameters[0].real_numel, np.float32)}}, together=together
            ),
        ):
            with pytest.raises(StorageError, match="Another rank"):
                modify(failing_elsewhere)
        assert [array.tobytes() for array in scanned(run)] == [array.tobytes() for array in before]
