"""Reading and replacing the whole state window by window, within the ring's memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.pipeline.state.windows import Window, WindowBuffer
from tests.helpers.native_testing import inject
from tests.pipeline.harness import Case, Run, assert_equal, running

CASES = [
    Case(),
    Case(num_buffers=16),
    Case(tasklet_bytes=1 << 20, num_buffers=2),
    Case(tasklet_bytes=100_000, num_buffers=9, num_devices=3),
    Case(durability="none", num_devices=2),
]
IDS = ["one-tasklet-windows", "one-window", "one-tasklet", "three-devices", "one-place"]


def scanned(run: Run) -> list[np.ndarray]:
    """Return the three arrays as scan() gives them."""
    arrays = [np.full(run.layout.numel, np.nan, np.float32) for _ in range(3)]

    def keep(window: Window) -> None:
        for array, values in zip(arrays, window.arrays, strict=True):
            array[window.begin : window.end] = values

    run.handler.state.scan(keep)
    return arrays


def from_arrays(arrays: list[np.ndarray]) -> Callable[[Window], None]:
    """Return a function that fills windows with these arrays."""

    def fill(window: Window) -> None:
        for array, values in zip(arrays, window.arrays, strict=True):
            values[:] = array[window.begin : window.end]

    return fill


def random_arrays(run: Run) -> list[np.ndarray]:
    return [np.random.default_rng(k).standard_normal(run.layout.numel, np.float32) for k in range(3)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_scan_hands_over_what_single_parameters_hold(tmp_path: Path, case: Case) -> None:
    """scan() gives the same bits as reading each parameter, for any tasklets, ring and devices."""
    with running(tmp_path, case) as run:
        run.steps(range(2))
        arrays = scanned(run)
        for index, where in enumerate(run.layout.parameters):
            values = run.handler.state.read_parameter(index)
            for name, array in zip(("master", "exp_avg", "exp_avg_sq"), arrays, strict=True):
                found = array[where.offset : where.offset + where.real_numel]
                assert found.tobytes() == values[name].tobytes(), (index, name)


def test_everything_else_goes_before_the_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved and loaded is moved in the background; steps and single parameters are not."""
    moved: list[tuple[native.Operation, native.IoClass]] = []
    submit = HostDevice.submit

    def record(device: HostDevice, batch: native.Batch) -> None:
        moved.append((batch.operation, batch.io_class))
        submit(device, batch)

    monkeypatch.setattr(HostDevice, "submit", record)
    with running(tmp_path, CASES[0]) as run:
        run.step(1)
        run.handler.state.read_parameter(0)
        assert moved and {io_class for _, io_class in moved} == {native.IoClass.STATE}
        moved.clear()
        arrays = scanned(run)
        run.handler.state.replace(from_arrays(arrays), steps=run.handler.steps)
    background = native.IoClass.BACKGROUND
    assert set(moved) == {(native.Operation.READ, background), (native.Operation.WRITE, background)}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_replaced_state_is_found_again(tmp_path: Path, case: Case) -> None:
    """replace() makes the next generation, padding included, and training continues from it."""
    with running(tmp_path, case) as run:
        run.step(1)
        arrays, steps = random_arrays(run), np.arange(len(run.layout.parameters)) + 4
        run.handler.state.replace(from_arrays(arrays), steps=steps)
        assert run.handler.generation == 2
        assert run.handler.steps.tolist() == steps.tolist()
        for found, array in zip(scanned(run), arrays, strict=True):
            assert found.tobytes() == array.tobytes()
        run.step(2)
        assert run.handler.generation == 3


@pytest.mark.parametrize("durability", ["none", "step"])
def test_state_of_another_store_goes_on_from_there(tmp_path: Path, durability: str) -> None:
    """Arrays and step counts of one store continue with the same bits in another store."""
    with running(tmp_path / "first", Case()) as run:
        run.steps(range(2))
        saved, arrays = run.state(), scanned(run)
        run.step(2)
        expected = run.state()
    with running(tmp_path / "second", Case(tasklet_bytes=100_000, durability=durability)) as run:
        run.handler.state.replace(from_arrays(arrays), steps=saved["steps"].numpy())
        masters = torch.from_numpy(arrays[0])
        for tensor, values in zip(run.partition, masters.split([t.numel() for t in run.partition]), strict=True):
            tensor.copy_(values)
        assert run.handler.generation == 1
        assert_equal(run.state(), saved)
        run.step(2)
        assert_equal(run.state(), expected)


def test_transfers_that_overtake_each_other(tmp_path: Path) -> None:
    """Late and short transfers do not mix up the bytes of windows."""
    with running(tmp_path, Case(num_buffers=8, num_devices=2)) as run:
        arrays = random_arrays(run)
        inject(run.device.pipeline, seed=3, max_delay_us=400, short_transfer_every=3)
        run.handler.state.replace(from_arrays(arrays), steps=run.handler.steps)
        for found, array in zip(scanned(run), arrays, strict=True):
            assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_windows_are_whole_tasklets_in_order_within_the_ring(tmp_path: Path, case: Case) -> None:
    """Windows cover the partition once. Two of them take at most the ring's memory or two tasklets."""
    with running(tmp_path, case) as run:
        windows: list[tuple[int, int, int]] = []
        run.handler.state.scan(lambda w: windows.append((w.begin, w.end, sum(a.nbytes for a in w.arrays))))
        numel, tasklet_numel = run.layout.numel, run.layout.extents.tasklet_numel
        assert [begin for begin, _, _ in windows] == [0, *(end for _, end, _ in windows[:-1])]
        assert windows[-1][1] == numel
        assert all(begin % tasklet_numel == 0 for begin, _, _ in windows)
        limit = max(run.device.ring_bytes, 2 * 12 * tasklet_numel)
        assert 2 * max(nbytes for _, _, nbytes in windows) <= limit
        assert WindowBuffer(run.layout, nbytes=run.device.ring_bytes).nbytes <= limit


def test_fill_that_raises_changes_nothing(tmp_path: Path) -> None:
    """If fill raises, the previous generation stays current to the bit, and the next step succeeds."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        run.step(1)
        before, calls = run.state(), []

        def fill(window: Window) -> None:
            calls.append(window.begin)
            window.arrays[0].fill(7)
            if len(calls) == 4:
                raise KeyError("gone")

        with pytest.raises(KeyError, match="gone"):
            run.handler.state.replace(fill, steps=run.handler.steps + 1)
        assert_equal(run.state(), before)
        assert run.handler.generation == 1
        run.step(2)


def test_visit_that_raises_leaves_the_device_free(tmp_path: Path) -> None:
    """If the visitor raises, the read in progress is waited for, and the device takes the next step."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        inject(run.device.pipeline, max_delay_us=2000)
        with pytest.raises(ZeroDivisionError):
            run.handler.state.scan(lambda window: 1 // 0)
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
    """The error names the file, the previous generation stays, and a second try succeeds."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        run.step(1)
        before, arrays = run.state(), random_arrays(run)
        inject(run.device.pipeline, **faults)
        with pytest.raises(kind, match=r"state\.bin"):
            run.handler.state.replace(from_arrays(arrays), steps=run.handler.steps)
        assert_equal(run.state(), before)
        run.handler.state.replace(from_arrays(arrays), steps=run.handler.steps)
        assert scanned(run)[0].tobytes() == arrays[0].tobytes()


def test_read_error_in_scan_is_reported(tmp_path: Path) -> None:
    """A read error is raised by scan(), and a second scan reads everything."""
    with running(tmp_path, Case(num_buffers=2)) as run:
        expected = run.state()["master"]
        inject(run.device.pipeline, fail_read_at=3)
        with pytest.raises(StorageError, match=r"state\.bin"):
            scanned(run)
        assert torch.equal(torch.from_numpy(scanned(run)[0]), expected)


def test_failure_elsewhere_keeps_the_commit_back(tmp_path: Path) -> None:
    """If the agreement of the ranks raises after all writes, nothing is committed."""
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
            run.handler.state.replace(
                from_arrays(random_arrays(run)), steps=run.handler.steps, together=other_rank_failed
            )
        assert written == [run.layout.extents.num_tasklets]
        assert_equal(run.state(), before)


@pytest.mark.parametrize("shapes", [(), ((0, 0, 0, 0),)], ids=["none", "empty"])
def test_partitions_of_nothing(tmp_path: Path, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    """A rank without elements visits and fills no window, and still commits its generation."""
    with running(tmp_path, Case(shapes=shapes)) as run:
        windows: list[Window] = []
        run.handler.state.scan(windows.append)
        run.handler.state.replace(windows.append, steps=run.handler.steps + 3)
        assert windows == []
        assert run.handler.generation == 1
        assert run.handler.steps.tolist() == [3] * len(shapes)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_run_of_the_partition_is_read_and_modified(tmp_path: Path, case: Case) -> None:
    """Modifying a range of elements replaces its master only, as one generation, and training continues."""
    with running(tmp_path, case) as run:
        run.steps(range(2))
        before, generation = scanned(run), run.handler.generation
        begin, end = run.layout.numel // 5, run.layout.numel // 2 + 7
        read = run.handler.state.read_range(begin, end, names=["master", "exp_avg_sq"])
        assert [read[name].tobytes() for name in read] == [before[i][begin:end].tobytes() for i in (0, 2)]
        run.handler.state.modify_range(begin, {"master": read["master"] + 1})
        before[0][begin:end] += 1
        assert run.handler.generation == generation + 1
        assert [array.tobytes() for array in scanned(run)] == [array.tobytes() for array in before]
        run.step(2)


def test_a_run_that_fails_elsewhere_is_not_modified(tmp_path: Path) -> None:
    """If another rank could not write its range, the previous generation stays current here."""

    @contextmanager
    def failing_elsewhere() -> Iterator[None]:
        yield
        raise StorageError("Another rank failed.", "None.")

    with running(tmp_path, Case()) as run:
        before = scanned(run)
        for modify in (
            lambda together: run.handler.state.modify_range(
                0, {"master": np.zeros(500, np.float32)}, together=together
            ),
            lambda together: run.handler.state.modify(
                {0: {"master": np.zeros(run.layout.parameters[0].real_numel, np.float32)}}, together=together
            ),
        ):
            with pytest.raises(StorageError, match="Another rank"):
                modify(failing_elsewhere)
        assert [array.tobytes() for array in scanned(run)] == [array.tobytes() for array in before]
