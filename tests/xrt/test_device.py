"""SmartSSDDevice under a transfer handler computes the host's bits, through real XRT on emulated cards."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.state.commit_record import encode_record
from tests.helpers.card_runs import OPTIMIZERS, cards, same_as_host, settled_host
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.native.cuda_fixture import fake_cuda
from tests.native.fake_cuda import FakeCuda
from tests.native.stored import align
from tests.pipeline.fake_link import CudaRun, FakeLink
from tests.pipeline.harness import Case, running
from tests.xrt.cards import EmulatedCards
from tests.xrt.long_run import DTYPES, compare

__all__ = ["fake_cuda"]

pytestmark = RunIf(xrt=True)


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    long_but(
        [
            *(("adamw", dtype) for dtype in DTYPES),
            *((optimizer, DTYPES[index % 3]) for index, optimizer in enumerate(OPTIMIZERS) if optimizer != "adamw"),
        ],
        itertools.product(OPTIMIZERS, DTYPES),
    ),
)
def test_five_steps(tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, dtype: torch.dtype) -> None:
    """Two cards write the host's state files, with groups that meet in tasklets and parameters without gradient."""
    case = Case(dtype=dtype, num_devices=2, **OPTIMIZERS[optimizer])
    device = cards(emulated_cards.build.xclbin)
    with (
        running(tmp_path / "card", case, device=device) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for step in range(5):
            run.step(step)
            host.step(step)
        same_as_host(run, host)
    assert all(emulated_cards.counter("runs_completed", card) for card in range(2))


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [*zip(OPTIMIZERS, (*DTYPES, torch.float32, torch.bfloat16), strict=True)]
)
def test_subnormals_infinities_and_nans(
    tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, dtype: torch.dtype
) -> None:
    """A short run of ``python -m tests.xrt.long_run`` finds no byte that differs from the host's."""
    compare(tmp_path, emulated_cards.build.xclbin, optimizer, dtype, steps=5, numel=70_001)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_gradients_through_the_cards_storage(
    tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, gradient_dtype: torch.dtype
) -> None:
    """The published route gives the same bytes, and leaves no file behind."""
    case = Case(dtype=torch.bfloat16, gradient_dtype=gradient_dtype, num_devices=2, **OPTIMIZERS[optimizer])
    device = cards(emulated_cards.build.xclbin, gradient_route="storage")
    with (
        running(tmp_path / "card", case, device=device) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for step in range(3):
            run.step(step)
            host.step(step)
        same_as_host(run, host)
        assert not list(tmp_path.rglob("gradients*"))


def test_a_thread_of_io_for_every_buffer(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Each card has a thread of I/O for every buffer, so that no request waits for one of the other direction."""
    counts = []
    for num_buffers in (2, 5):
        case = Case(num_devices=2, num_buffers=num_buffers)
        with running(tmp_path / str(num_buffers), case, device=cards(emulated_cards.build.xclbin)):
            names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
            counts.append(names.count("smart-inf-io"))
    assert counts[1] - counts[0] == 2 * (5 - 2)


# One group: every parameter takes part, and the bytes follow from the number of elements alone. It is odd, for padding.
PLAIN = ((40_999, 0, 0, 0), (24_602, 0, 0, 1))
NUMEL = 40_999 + 24_602


# Bytes per parameter: shared write, shared read, internal read, internal write. (4, 4, 16, 12) is as published.
TRAFFIC = {
    ("adamw", "host", torch.float32): (4, 4, 12, 12),
    ("adamw", "host", torch.bfloat16): (2, 2, 12, 12),
    ("adamw", "storage", torch.float32): (4, 4, 16, 12),
    ("adamw", "storage", torch.bfloat16): (2, 2, 14, 12),
    ("adagrad", "host", torch.float32): (4, 4, 8, 8),
    ("adagrad", "host", torch.bfloat16): (2, 2, 8, 8),
    ("adagrad", "storage", torch.float32): (4, 4, 12, 8),
    ("adagrad", "storage", torch.bfloat16): (2, 2, 10, 8),
    ("sgd", "host", torch.float32): (4, 4, 8, 8),
    ("sgd", "host", torch.bfloat16): (2, 2, 8, 8),
    ("sgd", "storage", torch.float32): (4, 4, 12, 8),
    ("sgd", "storage", torch.bfloat16): (2, 2, 10, 8),
    ("rmsprop", "host", torch.float32): (4, 4, 16, 16),
    ("rmsprop", "host", torch.bfloat16): (2, 2, 16, 16),
    ("rmsprop", "storage", torch.float32): (4, 4, 20, 16),
    ("rmsprop", "storage", torch.bfloat16): (2, 2, 18, 16),
}


@pytest.mark.parametrize(("optimizer", "route", "dtype"), TRAFFIC)
def test_traffic_of_a_step(
    tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, route: str, dtype: torch.dtype
) -> None:
    """Bytes per parameter are those of the tables; padding, trailers, status and commit records are counted apart."""
    changes = {**OPTIMIZERS[optimizer], "options": (OPTIMIZERS[optimizer].get("options", ({"lr": 0.1},))[0],)}
    case = Case(dtype=dtype, gradient_dtype=dtype, num_devices=2, shapes=PLAIN, **changes)
    device = cards(emulated_cards.build.xclbin, gradient_route=route)
    with running(tmp_path, case, device=device) as run:
        before, plan = run.handler.traffic(), run.collect(1)
        plan.active[:] = True
        emulated_cards.reset()
        run.handler.begin_step(plan)
        run.handler.commit()
        moved = run.handler.traffic() - before
        shared = (moved.shared_write_bytes, moved.shared_read_bytes)
        internal = (moved.internal_read_bytes, moved.internal_write_bytes)
        assert moved.numel == NUMEL
        assert (*shared, *internal) == tuple(NUMEL * nbytes for nbytes in TRAFFIC[optimizer, route, dtype])
        num_tasklets = run.layout.extents.num_tasklets
        runs = sum(emulated_cards.counter("runs_completed", card) for card in range(2))
        record = len(encode_record(run.store._record, job=bytes(16)))
        assert runs == num_tasklets
        # A trailer each way, a status that is cleared and read, and the commit record.
        assert moved.control_bytes == num_tasklets * 2 * BLOCK_BYTES + runs * 2 * 64 + record
        extents = sum(extent.nbytes for extent in run.layout.extents.extents)
        arrays = extents - num_tasklets * BLOCK_BYTES
        # The gradients of a tasklet fill whole pages of the file that they go through.
        gradients = [extent.numel * dtype.itemsize for extent in run.layout.extents.extents]
        through_file = sum(map(align, gradients)) if route == "storage" else 0
        assert sum(folder.read_bytes for folder in moved.folders) == extents + through_file
        assert sum(folder.write_bytes for folder in moved.folders) == extents + through_file
        assert moved.storage_write_bytes == extents + through_file
        # Arrays fill blocks, each way; parameters fill beats, and so do gradients, or blocks twice through the file.
        units = (64, BLOCK_BYTES, BLOCK_BYTES) if route == "storage" else (64, 64)
        filling = sum(-nbytes % unit for nbytes in gradients for unit in units)
        assert filling > 0
        assert moved.padding_bytes == 2 * (arrays - NUMEL * TRAFFIC[optimizer, "host", dtype][-1]) + filling


def test_an_incremental_step(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A step may begin tasklets in any order and in pieces, and wait for them one by one, on both cards."""
    case = Case(dtype=torch.bfloat16, num_devices=2)
    with (
        running(tmp_path / "card", case, device=cards(emulated_cards.build.xclbin)) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for step in range(3):
            for each in (run, host):
                plan = each.collect(step)
                plan.active[:] = True
                each.handler.begin_incremental(plan)
                for tasklets in ([5, 4], [1], [3]):
                    each.handler.step.extend(tasklets)
                assert each.handler.step.complete(plan)
                each.handler.step.wait([6, 0])
                each.handler.step.wait(slice(1, 3))
                each.handler.commit()
        same_as_host(run, host)


def test_gradients_that_are_still_on_their_way(
    tmp_path: Path, emulated_cards: EmulatedCards, fake_cuda: FakeCuda
) -> None:
    """A tasklet goes to a card when a CUDA device has sent its gradients, though the host has long gone on."""
    case, link = Case(num_devices=2), FakeLink(fake_cuda)
    device = cards(emulated_cards.build.xclbin)
    run = CudaRun(tmp_path / "card", case, link, on_device=False, device=device)
    with running(tmp_path / "host", case, device=settled_host) as host:
        for step in range(2):
            for each in (run, host):
                each.arena.reset()
                plan = replace(each.plan(), active=np.ones(len(each.parameters), np.bool_))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_parameters(tmp_path: Path, emulated_cards: EmulatedCards, dtype: torch.dtype) -> None:
    """Staged parameters pass through a buffer, as those on storage or on a GPU do."""
    case = Case(dtype=dtype, num_devices=2, staged=True)
    with (
        running(tmp_path / "card", case, device=cards(emulated_cards.build.xclbin)) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for step in range(3):
            run.step(step)
            host.step(step)
        same_as_host(run, host)


def test_rollback_and_outside_changes(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A rollback restores the parameters of the step before, and the next step updates state written from outside."""
    case = Case(num_devices=2)
    values = np.linspace(-1, 1, case.shapes[1][0], dtype=np.float32)
    with (
        running(tmp_path / "card", case, device=cards(emulated_cards.build.xclbin)) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for each in (run, host):
            each.step(0)
            before = torch.cat(each.partition).clone()
            each.handler.begin_step(each.collect(1))
            each.handler.roll_back()
            assert torch.equal(torch.cat(each.partition), before)
            each.handler.state.modify({1: {"master": values}})
            each.slice(1).copy_(torch.from_numpy(values))
            each.step(1)
        same_as_host(run, host)


def test_memory_and_description(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Host memory holds trailers and two buffers, not the ring; the description says what updates, and how."""
    case = Case(num_devices=2, num_buffers=8)
    with running(tmp_path, case, device=cards(emulated_cards.build.xclbin)) as run:
        extent = run.layout.extents.place_bytes
        assert run.device.ring_bytes == 2 * extent + 2 * 8 * BLOCK_BYTES and run.device.cache_bytes == 0
        assert not run.device.moves_tasklets and not run.device.updates_from_parameters
        assert run.device.description == (
            "Optimizer state: updated on SmartSSD (emulated card 0, emulated card 1; adamw_update, gradients by way of"
            " host, XRT by native), threads for P2P."
        )
