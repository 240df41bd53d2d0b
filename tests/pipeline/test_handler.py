"""What the handler moves, what it holds, and in which order it works. test_programs.py has the bits.

test_rules.py compares its arithmetic with torch.optim's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_smartinfinity import StorageError, native
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.pipeline.layout.partition_layout import with_residents
from lightning_smartinfinity.pipeline.state.windows import WindowBuffer
from lightning_smartinfinity.storage import recover_store
from tests.pipeline.harness import Case, Run, complete_tasklets, everything, layout_of, running

BF16 = torch.bfloat16


def test_a_completed_step_goes_on_with_what_is_used_first(tmp_path: Path) -> None:
    """Backward opens the last layers' tasklets first. On completion the order becomes that of first use."""
    with running(tmp_path, Case()) as run:
        plan = run.collect(1)
        uses = np.random.default_rng(0).permutation(len(run.layout.parameters))
        preferred: list[list[int]] = []
        run.device.prefer = preferred.append  # type: ignore[method-assign, assignment]
        run.handler.begin_incremental(everything(plan))
        opened = complete_tasklets(run, plan)[::-1]
        run.handler.step.extend(opened)
        assert opened and run.handler.step.complete(replace(plan, first_uses=uses))
        run.handler.commit()
        tasklets = run.layout.in_order_of_use(range(len(run.layout.tasklets)), uses)
        listed = [*opened, *(tasklet for tasklet in tasklets if tasklet not in opened)]
        assert [listed[position] for position in preferred[0]] == [t for t in tasklets if t in listed]


@pytest.mark.parametrize(
    ("optimizer", "state_format", "dtype", "read_bytes", "written_bytes"),
    [
        (torch.optim.AdamW, "fp32", torch.float32, 8, 12),
        (torch.optim.AdamW, "fp32", BF16, 12, 12),
        (torch.optim.AdamW, "bf16", BF16, 8, 8),
        (torch.optim.AdamW, "bf16", torch.float32, 4, 8),
        (torch.optim.AdamW, "int8", BF16, 6, 6),
        (torch.optim.AdamW, "int8", torch.float32, 2, 6),
        (torch.optim.AdamW, "int8_remainder", BF16, 4, 6),
        (torch.optim.Adagrad, "fp32", torch.float32, 4, 8),
        (torch.optim.SGD, "fp32", BF16, 8, 8),
        (torch.optim.RMSprop, "fp32", torch.float32, 12, 16),
    ],
)
def test_traffic(
    tmp_path: Path, optimizer: type, state_format: str, dtype: torch.dtype, read_bytes: int, written_bytes: int
) -> None:
    """A step moves the documented bytes per parameter, plus exponents and trailers. No channel is internal."""
    numel = 40_960
    case = Case(
        optimizer=optimizer,
        options=({}, {}),
        dtype=dtype,
        state_format=state_format,
        shapes=((numel, 0, 0, 0),),
        tasklet_bytes=1 << 20,
    )
    with running(tmp_path, case) as run:
        before = run.handler.traffic()
        run.step(1)
        moved = run.handler.traffic() - before
        overhead = 2 * 4096 if state_format.startswith("int8") else 4096
        assert moved.shared_read_bytes == read_bytes * numel + overhead
        assert (moved.shared_write_bytes, moved.steps, moved.numel) == (written_bytes * numel + overhead, 1, numel)
        assert moved.internal_read_bytes == moved.internal_write_bytes == 0


def test_memory_is_bounded(tmp_path: Path) -> None:
    """The ring holds num_buffers extents, and staging takes at most as much again."""
    with running(tmp_path, Case(staged=True, num_buffers=4, dtype=BF16)) as run:
        assert run.device.ring_bytes == 4 * run.layout.extents.place_bytes <= 4 * 64 * 1024
        assert run.device.ring_bytes < run.handler.ring_bytes <= 2 * run.device.ring_bytes


def test_tasklets_without_gradient_stay_where_they_are(tmp_path: Path) -> None:
    """A tasklet without an active parameter keeps its place and its generation. A step without any is a generation."""
    with running(tmp_path, Case(shapes=((8_192, 0, 0, 0), (4_096, 0, 0, 0), (8_192, 0, 0, 0)))) as run:
        run.step(2)  # the second parameter has no gradient
        for generation in (1, 2):
            assert (run.handler.generation, run.store.placement.positions.tolist()) == (generation, [5, 6, 2, 8, 9])
            assert (run.store.tasklet_generations.tolist(), run.handler.steps.tolist()) == ([1, 1, 0, 1, 1], [1, 0, 1])
            plan = run.collect(3)
            run.arena.reset()
            run.handler.begin_step(plan)
            run.handler.step.wait()
            run.handler.commit()


@pytest.mark.parametrize(
    "shapes", [(), ((0, 0, 0, 0),), ((0, 0, 0, 0), (5, 5, 1, 1))], ids=["none", "empty", "padding"]
)
def test_partitions_of_nothing(tmp_path: Path, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    """A rank without elements, or with padding only, can do a step, and read and replace its state."""
    with running(tmp_path, Case(shapes=shapes)) as run:
        plan = run.collect(0)
        for index in range(len(shapes)):
            run.arena.arrive(index, torch.empty(0))
        run.handler.begin_step(plan)
        run.handler.step.wait(slice(0, 1))
        run.handler.commit()
        assert run.handler.steps.tolist() == [1] * len(shapes)
        windows: list[object] = []
        run.handler.state.scan(windows.append)
        run.handler.state.replace(windows.append, steps=run.handler.steps + 3)
        assert (len(windows), run.handler.generation) == (2 * (run.layout.numel > 0), 2)
        assert run.handler.steps.tolist() == [4] * len(shapes)


# ---- reading and replacing the whole state window by window, within the ring's memory


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
        assert windows[-1][1] == numel and all(begin % tasklet_numel == 0 for begin, _, _ in windows)
        limit = max(run.device.ring_bytes, 2 * 12 * tasklet_numel)
        assert 2 * max(nbytes for _, _, nbytes in windows) <= limit
        assert WindowBuffer(run.layout, nbytes=run.device.ring_bytes).nbytes <= limit


# ---- the cache of state in host memory: fewer bytes moved, nothing stale


def sizes(case: Case) -> list[int]:
    return [extent.nbytes for extent in layout_of(case).extents.extents]


@pytest.mark.parametrize(
    ("durability", "state_format"), [("step", "fp32"), ("none", "fp32"), ("power", "int8_remainder")]
)
def test_what_is_saved_is_counted(tmp_path: Path, durability: str, state_format: str) -> None:
    """Every byte is counted as moved or as saved: reads with durability, reads and writes without."""
    case = Case(dtype=torch.bfloat16, durability=durability, state_format=state_format, tasklet_bytes=65_536)
    resident = sizes(case)[:2]
    with (
        running(tmp_path / "plain", case) as plain,
        running(tmp_path / "cached", case.but(cache_bytes=sum(resident))) as cached,
    ):
        for run in (plain, cached):
            run.steps(range(3))
            run.state()
        moved, saved = plain.handler.traffic(), cached.handler.traffic()
    assert (moved.cached_read_bytes, moved.cached_write_bytes) == (0, 0)
    assert saved.shared_read_bytes + saved.cached_read_bytes == moved.shared_read_bytes
    assert saved.shared_write_bytes + saved.cached_write_bytes == moved.shared_write_bytes
    assert saved.cached_read_bytes > 0 and (saved.cached_write_bytes > 0) == (durability == "none")
    if state_format == "fp32":
        # The first tasklet is all of parameter 1, which has no gradient at one step of three. Then all is read once.
        assert saved.cached_read_bytes == 3 * resident[0] + 4 * resident[1]
        # Those of the first state and of the three steps.
        assert saved.cached_write_bytes in (0, 3 * resident[0] + 4 * resident[1])


def test_resident_tasklets_are_never_read_again(tmp_path: Path) -> None:
    """With all state in memory a step reads nothing. Without durability it writes nothing and takes no space.

    A rollback reads the generation before, once.
    """
    for durability in ("step", "none"):
        case = Case(durability=durability, cache_bytes=1 << 30, num_devices=2)
        with running(tmp_path / durability, case) as run:
            assert run.handler.cache_bytes == sum(sizes(case))
            before = run.handler.traffic()
            run.steps(range(3))
            after = run.handler.traffic()
            assert after.read_calls == before.read_calls == 0
            assert (after.write_calls > before.write_calls) == (durability == "step")
            files = [folder / "default" / "rank-00000" / "state.bin" for folder in run.folders]
            assert (sum(file.stat().st_size for file in files) == 0) == (durability == "none")
            if durability == "step":
                run.handler.begin_step(run.collect(3))
                run.handler.finish()
                run.handler.roll_back()
                rolled_back = run.handler.traffic().read_calls
                assert rolled_back > 0
                run.step(3)
                assert run.handler.traffic().read_calls == rolled_back


@pytest.mark.parametrize("written_through", [True, False])
def test_whole_tasklets_from_the_first_on(written_through: bool) -> None:
    """The cache holds whole tasklets from the first on. Without write-through the files hold only the others."""
    layout = layout_of(Case(durability="step" if written_through else "none", num_devices=2))
    nbytes = [extent.nbytes for extent in layout.extents.extents]
    for given_bytes, count in ((0, 0), (nbytes[0] - 1, 0), (nbytes[0], 1), (sum(nbytes) - 1, len(nbytes) - 1)):
        cut = with_residents(layout, nbytes=given_bytes, written_through=written_through)
        assert cut.num_resident == count
        on_storage = nbytes if written_through else nbytes[count:]
        places = [cut.extents.num_places(device) for device in range(2)]
        places_per_tasklet = 2 if written_through else 1
        assert sum(places) == len(on_storage) * places_per_tasklet and max(places) - min(places) <= places_per_tasklet
        assert cut.extents.place_bytes == max(on_storage)


def test_a_store_with_state_in_memory_is_not_recovered(tmp_path: Path) -> None:
    """A store with state only in memory is refused with the reason. The same store without a cache is recovered."""
    case = Case(durability="none")
    for cache_bytes in (0, sizes(case)[0]):
        run = Run(tmp_path / str(cache_bytes), case.but(cache_bytes=cache_bytes))
        run.step(1)
        run.close(remove=False)
    recover_store([tmp_path / "0" / "disk0"]).close(remove=True)
    with pytest.raises(StorageError, match="1 tasklets were in the memory") as caught:
        recover_store([tmp_path / str(sizes(case)[0]) / "disk0"])
    assert "checkpoint" in caught.value.remedy
