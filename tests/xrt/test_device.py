"""SmartSSDDevice under a transfer handler computes the host's bits, through real XRT on emulated cards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_smartinfinity.devices.base import FolderTraffic
from lightning_smartinfinity.planning.memory import host_bytes
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.state.commit_record import encode_record
from tests.helpers.card_runs import OPTIMIZERS, beside_host, cards, pipelines, same_as_host, settled_host
from tests.helpers.native_testing import Throttle
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that
from tests.native.fake_cuda import FakeCuda
from tests.native.stored import align
from tests.pipeline.fake_link import CudaRun, FakeLink
from tests.pipeline.harness import Case, Run, everything, running, step_of_all
from tests.planning.test_memory import CASE as PLANNED
from tests.planning.test_memory import DENSE
from tests.xrt.cards import EmulatedCards
from tests.xrt.long_run import DTYPES, compare

pytestmark = RunIf(xrt=True)

F32, BF16, F16 = DTYPES
NUM_STEPS = 4


@pytest.mark.parametrize(
    ("optimizer", "dtype", "gradient_dtype", "route", "changes"),
    [
        ("adamw", F32, F32, "host", {}),
        ("adamw", BF16, F32, "storage", {}),
        ("adamw", BF16, BF16, "host", {"staged": True}),
        ("adam", F16, BF16, "storage", {}),
        ("adagrad", BF16, BF16, "storage", {"staged": True}),
        ("adagrad", F16, F32, "host", {}),
        ("sgd", F32, F32, "storage", {"staged": True}),
        ("rmsprop", F16, F16, "host", {"num_buffers": 2}),
        ("rmsprop", F32, BF16, "storage", {}),
    ],
)
def test_as_on_the_host(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    optimizer: str,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    route: str,
    changes: dict[str, Any],
) -> None:
    """Two cards write the host's state files, with groups that meet in tasklets and parameters without gradient.

    Both routes of gradients give the same bytes, and the published one, by way of storage, leaves no file behind.
    Parameters that are staged pass through a buffer, as those on storage or on a GPU do.
    """
    case = Case(dtype=dtype, gradient_dtype=gradient_dtype, num_devices=2, **changes, **OPTIMIZERS[optimizer])
    with beside_host(tmp_path, case, emulated_cards.build.xclbin, gradient_route=route) as (run, host):
        for each in (run, host):
            each.steps(range(NUM_STEPS))
        assert not list(tmp_path.rglob("gradients*"))
    assert all(emulated_cards.counter("runs_completed", card) for card in range(2))


@pytest.mark.parametrize(("optimizer", "dtype"), [*zip(OPTIMIZERS, (*DTYPES, F32, BF16), strict=True)])
def test_subnormals_infinities_and_nans(
    tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, dtype: torch.dtype
) -> None:
    """A short run of ``python -m tests.xrt.long_run`` finds no byte that differs from the host's."""
    compare(tmp_path, emulated_cards.build.xclbin, optimizer, dtype, steps=4, numel=70_001)


# One group: every parameter takes part, and the bytes follow from the number of elements alone. It is odd, for padding.
PLAIN = ((40_999, 0, 0, 0), (24_602, 0, 0, 1))
NUMEL = 40_999 + 24_602


# Bytes per parameter: shared write, shared read, internal read, internal write. (4, 4, 16, 12) is as published.
TRAFFIC = {
    ("adamw", "host", F32): (4, 4, 12, 12),
    ("adamw", "host", BF16): (2, 2, 12, 12),
    ("adamw", "storage", F32): (4, 4, 16, 12),
    ("adamw", "storage", BF16): (2, 2, 14, 12),
    ("adagrad", "storage", F32): (4, 4, 12, 8),
    ("sgd", "host", F32): (4, 4, 8, 8),
    ("rmsprop", "host", BF16): (2, 2, 16, 16),
    ("rmsprop", "storage", BF16): (2, 2, 18, 16),
}


@pytest.mark.parametrize(("optimizer", "route", "dtype"), TRAFFIC)
def test_traffic_of_a_step(
    tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, route: str, dtype: torch.dtype
) -> None:
    """Bytes per parameter are those of the tables; padding, trailers, status and commit records are counted apart."""
    changes = {**OPTIMIZERS[optimizer], "options": (OPTIMIZERS[optimizer].get("options", ({"lr": 0.1},))[0],)}
    case = Case(dtype=dtype, gradient_dtype=dtype, num_devices=2, shapes=PLAIN, **changes)
    with running(tmp_path, case, device=cards(emulated_cards.build.xclbin, gradient_route=route)) as run:
        before = run.handler.traffic()
        emulated_cards.reset()
        step_of_all(run, 1)
        moved = run.handler.traffic() - before
        shared = (moved.shared_write_bytes, moved.shared_read_bytes)
        internal = (moved.internal_read_bytes, moved.internal_write_bytes)
        assert (*shared, *internal) == tuple(NUMEL * nbytes for nbytes in TRAFFIC[optimizer, route, dtype])
        runs, sent, received = (
            sum(emulated_cards.counter(name, card) for card in range(2))
            for name in ("runs_completed", "bytes_to", "bytes_from")
        )
        num_tasklets = run.layout.extents.num_tasklets
        assert moved.numel == NUMEL and runs == num_tasklets
        # A trailer each way, a status that is cleared and read, and the commit record.
        record = len(encode_record(run.store._record, job=bytes(16)))
        assert moved.control_bytes == num_tasklets * 2 * BLOCK_BYTES + runs * 2 * 64 + record
        extents = sum(extent.nbytes for extent in run.layout.extents.extents)
        arrays = extents - num_tasklets * BLOCK_BYTES
        # The gradients of a tasklet fill whole pages of the file that they go through.
        gradients = [extent.numel * dtype.itemsize for extent in run.layout.extents.extents]
        through_file = sum(map(align, gradients)) if route == "storage" else 0
        read, written = (sum(getattr(each, name) for each in moved.folders) for name in ("read_bytes", "write_bytes"))
        assert read == written == moved.storage_write_bytes == extents + through_file
        # Arrays fill blocks, each way; parameters fill beats, and so do gradients, or blocks twice through the file.
        beats = sum(-nbytes % 64 for nbytes in gradients)
        filling = beats + (2 * sum(-nbytes % BLOCK_BYTES for nbytes in gradients) if route == "storage" else beats)
        assert moved.padding_bytes == 2 * (arrays - moved.internal_write_bytes) + filling > 0
        # XRT moved gradients, parameters and status beats.
        assert sent == runs * 64 + (0 if route == "storage" else NUMEL * dtype.itemsize + beats)
        assert received == runs * 64 + NUMEL * dtype.itemsize + beats


def test_gradients_that_are_still_on_their_way(
    tmp_path: Path, emulated_cards: EmulatedCards, fake_cuda: FakeCuda
) -> None:
    """A tasklet goes to a card when a CUDA device has sent its gradients, though the host has long gone on."""
    case, link = Case(num_devices=2), FakeLink(fake_cuda)
    run = CudaRun(tmp_path / "card", case, link, on_device=False, device=cards(emulated_cards.build.xclbin))
    with running(tmp_path / "host", case, device=settled_host) as host:
        for step in range(2):
            for each in (run, host):
                each.arena.reset()
                plan = everything(each.plan())
                each.handler.begin_incremental(plan)
                for index, parameter in enumerate(each.layout.parameters):
                    gradient = link.on_device(torch.linspace(-1, step, parameter.real_numel))
                    each.arena.arrive(index, link.copy(gradient, us=20_000) if each is run else gradient)
                each.handler.step.extend(list(range(len(each.layout.tasklets))))
                assert each.handler.step.complete(plan)
                each.handler.commit()
        same_as_host(run, host)
    run.close()
    link.close()


def test_changes_from_outside(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A step updates state that was written from outside."""
    case = Case(num_devices=2)
    values = np.linspace(-1, 1, case.shapes[1][0], dtype=np.float32)
    with beside_host(tmp_path, case, emulated_cards.build.xclbin) as runs:
        for each in runs:
            each.step(0)
            each.handler.state.modify({1: {"master": values}})
            each.slice(1).copy_(torch.from_numpy(values))
            each.step(1)


def test_state_is_written_before_it_is_flushed(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability="power", all that each card writes is on its storage when that is flushed for the one record."""
    written: list[int] = []

    def flushed() -> None:
        written.extend(folder.write_bytes for folder in (run.handler.traffic() - before).folders)
        flush()

    case = Case(dtype=torch.bfloat16, num_devices=2, durability="power")
    with running(tmp_path, case, device=cards(emulated_cards.build.xclbin)) as run:
        before, flush = run.handler.traffic(), run.store._flush_files
        monkeypatch.setattr(run.store, "_flush_files", flushed)
        step_of_all(run, 1)
        assigned = [*zip(run.layout.extents.extents, run.store.assigned, strict=True)]
    assert written == [sum(extent.nbytes for extent, device in assigned if device == number) for number in range(2)]


def test_threads_memory_and_description(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Each card has a thread of I/O for every buffer, so that no request waits for one of the other direction.

    Host memory holds trailers and two buffers, not the ring. The description says what updates, and how.
    """
    counts = []
    for num_buffers in (2, 8):
        case = Case(num_devices=2, num_buffers=num_buffers)
        with running(tmp_path / str(num_buffers), case, device=cards(emulated_cards.build.xclbin)) as run:
            names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
            counts.append(names.count("smart-inf-io"))
            extent = run.layout.extents.place_bytes
            assert run.device.ring_bytes == 2 * extent + 2 * num_buffers * BLOCK_BYTES and run.device.cache_bytes == 0
            assert not run.device.moves_tasklets and not run.device.updates_from_parameters
            assert run.device.description == (
                "Optimizer state: updated on SmartSSD (emulated card 0, emulated card 1; adamw_update, gradients by way"
                " of host, XRT by native), threads for P2P."
            )
    assert counts[1] - counts[0] == 2 * (8 - 2)


@pytest.mark.parametrize("route", [Route.HOST, Route.STORAGE])
def test_planned_memory(emulated_cards: EmulatedCards, tmp_path: Path, route: Route) -> None:
    """The predicted memory equals the host's ring for cards and its gradients that wait to be sent, by either route."""
    device = cards(emulated_cards.build.xclbin, gradient_route=route.value)
    with running(tmp_path, PLANNED.but(num_devices=2), device=device) as run:
        held = {"ring": run.handler.ring_bytes, "gradient_arena": run.arena.buffer.nbytes}
    assert host_bytes(DENSE, arena_item_bytes=4, num_cards=2, route=route) == held


# ---- what overlaps, by the order of events: a run that hangs keeps the card's kernel until it is released


OVERLAPPING = Case(dtype=torch.bfloat16, shapes=((40_000, 0, 0, 0),), num_buffers=4)


class Begun(NamedTuple):
    """A step whose first run is held, the parameters before it, and what has moved since, by folder."""

    run: Run
    parameters: torch.Tensor
    folders: Callable[[], Sequence[FolderTraffic]]


@contextmanager
def begun(
    folder: Path,
    emulated_cards: EmulatedCards,
    caplog: pytest.LogCaptureFixture,
    case: Case = OVERLAPPING,
    prepare: Callable[[Run], object] = bool,
    **where: int,
) -> Iterator[Begun]:
    """Yield a step that has begun while a run of a card is held; in the end the step is compared with the host's.

    It does not wait until the card's timeout, after which the host would take over.
    """
    with beside_host(folder, case, emulated_cards.build.xclbin) as (run, host):
        prepare(run)
        before, parameters = run.handler.traffic(), run.partition[0].clone()
        emulated_cards.inject("hang", **where)
        run.handler.begin_step(run.collect(1))
        emulated_cards.wait_for("run-hung")
        yield Begun(run, parameters, lambda: (run.handler.traffic() - before).folders)
        emulated_cards.release()
        run.handler.commit()
        host.step(1)
    assert "failed: " not in caplog.text


def test_what_goes_on_beside_a_run(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture
) -> None:
    """While one tasklet is computed, the next are read from the SSD and the gradient of one arrives.

    The parameters of the tasklet before have arrived, and its state is on the SSD.
    """
    with begun(tmp_path, emulated_cards, caplog, skipped=1) as step:
        extents = step.run.layout.extents

        def arrived() -> int:
            return len([event for event in emulated_cards.events("to-end") if int(event.fields[1]) > 64])

        await_that(lambda: step.folders()[0].write_bytes == extents.extents[0].nbytes)
        await_that(lambda: arrived() == 3 and step.folders()[0].read_bytes == 5 * extents.extents[0].nbytes)
        numel = extents.tasklet_numel
        pairs = zip(step.run.partition[0].split(numel), step.parameters.split(numel), strict=True)
        assert sum(not torch.equal(now, then) for now, then in pairs) == len(emulated_cards.events("run-end")) == 1


def test_a_card_goes_on_while_another_is_held(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture
) -> None:
    """All of one card's tasklets are computed, and their state written, while the other's first kernel is held."""
    with begun(tmp_path, emulated_cards, caplog, OVERLAPPING.but(num_devices=2), card=0) as step:
        extents, assigned = step.run.layout.extents.extents, step.run.store.assigned
        own = [extent.nbytes for extent, device in zip(extents, assigned, strict=True) if device]
        emulated_cards.wait_for("run-end", card=1, count=len(own))
        await_that(lambda: step.folders()[1].write_bytes == sum(own))
        assert not emulated_cards.events("run-end", card=0) and step.folders()[0].write_bytes == 0


def test_parameters_are_there_before_their_state_is_written(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait for a tasklet's parameters does not wait for the slow write of its state."""
    throttles: list[Throttle] = []

    def prepare(run: Run) -> None:
        throttles.append(Throttle(pipelines(run)[0], run.store.files))

    with begun(tmp_path, emulated_cards, caplog, OVERLAPPING.but(shapes=((5_000, 0, 0, 0),)), prepare) as step:
        # The state has been read: only its write is slow from now on.
        throttles[0].bytes_per_second = 2 * step.run.layout.extents.extents[0].nbytes
        emulated_cards.release()
        step.run.handler.step.wait([0])
        assert step.folders()[0].write_bytes == 0 and not torch.equal(step.run.partition[0], step.parameters)
        throttles[0].bytes_per_second = 0
