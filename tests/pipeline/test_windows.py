"""Reading and replacing the whole state window by window, within the ring's memory. test_programs.py has the bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.pipeline.state.windows import WindowBuffer
from tests.pipeline.harness import Case, running


def test_everything_else_goes_before_the_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved and loaded is moved in the background; steps and single parameters are not."""
    moved: list[tuple[native.Operation, native.IoClass]] = []
    submit = HostDevice.submit

    def record(device: HostDevice, batch: native.Batch) -> None:
        moved.append((batch.operation, batch.io_class))
        submit(device, batch)

    monkeypatch.setattr(HostDevice, "submit", record)
    with running(tmp_path, Case()) as run:
        run.step(1)
        run.handler.state.read_parameter(0)
        assert moved and {io_class for _, io_class in moved} == {native.IoClass.STATE}
        moved.clear()
        run.handler.state.scan(lambda window: None)
        run.handler.state.replace(lambda window: None, steps=run.handler.steps)
    background = native.IoClass.BACKGROUND
    assert set(moved) == {(native.Operation.READ, background), (native.Operation.WRITE, background)}


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(num_buffers=16),
        Case(tasklet_bytes=1 << 20, num_buffers=2),
        Case(tasklet_bytes=100_000, num_buffers=9, num_devices=3),
    ],
    ids=["one-tasklet-windows", "one-window", "one-tasklet", "three-devices"],
)
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
