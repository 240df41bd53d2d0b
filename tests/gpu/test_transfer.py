"""Arena, parameters and streams on a real CUDA device. tests/pipeline/test_cuda.py covers them without one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink, link_to
from lightning_smartinfinity.pipeline.parameters.partitions import CudaPartition
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Case, Run, after_steps, assert_equal, layout_of

pytestmark = RunIf(cuda_devices=1)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL_RING = Case(num_buffers=2, shapes=(*Case().shapes, (50_000, 3, 1, 3)))
BUSY_CYCLES = 500_000_000  # a few tenths of a second


@pytest.fixture
def link() -> Iterator[CudaLink]:
    link = link_to(torch.device("cuda", torch.cuda.current_device()))
    assert link is not None
    yield link
    torch.cuda.synchronize()


class CudaRun(Run):
    """A run whose partition is on the device; ``partition`` is its copy on the host, for comparisons."""

    def __init__(self, folder: Path, case: Case, link: CudaLink) -> None:
        self.link = link
        self.on_device: list[torch.Tensor] = []
        super().__init__(folder, case)

    def make_arena(self) -> GradientArena:
        return GradientArena(self.layout, dtype=self.case.gradient_dtype, link=self.link)

    def send(self, parameter: int, gradient: torch.Tensor) -> None:
        super().send(parameter, gradient.cuda())

    def outputs(self) -> CudaPartition:
        self.on_device = self.on_device or [tensor.cuda() for tensor in self.partition]
        return self.link.partition(self.on_device)

    def state(self) -> dict[str, torch.Tensor]:
        for tensor, on_device in zip(self.partition, self.on_device, strict=True):
            tensor.copy_(on_device)
        return super().state()


@pytest.mark.parametrize("dtype", DTYPES)
def test_partition_on_the_device(tmp_path: Path, link: CudaLink, dtype: torch.dtype) -> None:
    """A partition on the device takes the same bits as one in host memory, through commits and rollbacks."""
    expected = after_steps(tmp_path / "host", SMALL_RING.but(dtype=dtype))
    run = CudaRun(tmp_path / "cuda", SMALL_RING.but(dtype=dtype), link)
    for number in range(3):
        before = run.state()
        run.handler.begin_step(run.collect(1))
        run.handler.step.wait(slice(0, 1))
        run.roll_back_to(before)
        run.step(number)
    assert_equal(run.state(), expected)
    run.close()


@pytest.mark.parametrize(("arena_dtype", "dtype"), [*zip(DTYPES, DTYPES, strict=True), *itertools.pairwise(DTYPES)])
def test_gradients_from_the_device(link: CudaLink, arena_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """First and later gradients from several streams, some from the host, give the host's bits."""
    layout = layout_of(Case(shapes=((1_200_000, 1, 0, 0), (7, 0, 0, 0)), tasklet_bytes=1 << 20))
    host = GradientArena(layout, dtype=arena_dtype)
    device = GradientArena(layout, dtype=arena_dtype, link=link, num_threads=2)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for number in range(4):
        for index, parameter in enumerate(layout.parameters):
            values = torch.randn(parameter.real_numel, generator=torch.Generator().manual_seed(number)).to(dtype)
            host.arrive(index, values)
            with torch.cuda.stream(streams[number % 2]):
                device.arrive(index, values if number == 2 else values.cuda())
    assert device.sum_of_squares() == host.sum_of_squares()
    assert torch.equal(device.buffer, host.buffer)
    assert link.device.registration_failure == "" and not device.buffer.is_pinned()
    replacing = torch.ones(7, device="cuda")
    torch.cuda._sleep(BUSY_CYCLES)
    device.replace(1, replacing)
    replacing.fill_(5.0)  # the caller may change it
    device.synchronize()
    assert (device.gradient(1) == 1).all()
    device.close()


@pytest.mark.parametrize("number", [1, 2])
def test_a_gradient_of_another_stream_is_kept(link: CudaLink, number: int) -> None:
    """Its memory is used again only after the copy, or the addition, on a stream that did not allocate it."""
    arena = GradientArena(layout_of(Case()), link=link)
    other, later = torch.cuda.Stream(), []
    for _ in range(number):
        gradient = torch.ones(12_000, device="cuda")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(BUSY_CYCLES)
            arena.arrive(1, gradient)
        del gradient
        later.append(torch.full((12_000,), 5.0, device="cuda"))
    arena.synchronize()
    assert (arena.gradient(1) == number).all()
    arena.close()


def test_copies_keep_their_order_with_the_users_stream(tmp_path: Path, link: CudaLink) -> None:
    """Reads of parameters before the step see the old values, however late they run.

    Reads after wait() see the new ones.
    """
    run = CudaRun(tmp_path, Case(), link)
    old = [tensor.clone() for tensor in run.on_device]
    plan = run.collect(1)
    torch.cuda._sleep(BUSY_CYCLES)
    before = [tensor.clone() for tensor in run.on_device]
    run.handler.begin_step(plan)
    run.handler.step.wait()
    after = [tensor.clone() for tensor in run.on_device]
    run.handler.commit()
    assert all(torch.equal(a, b) for a, b in zip(before, old, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, run.on_device, strict=True))
    assert not torch.equal(after[0], old[0])
    run.close()
