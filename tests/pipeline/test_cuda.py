"""Partitions and gradients on a fake CUDA device: order, errors and lifetimes without a GPU."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CudaError, StorageError
from lightning_smartinfinity.pipeline.gradients import arriving_gradients
from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientWindows
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject
from tests.native.fake_cuda import SYNCHRONOUS, FakeCuda
from tests.pipeline.fake_link import CudaRun, FakeLink
from tests.pipeline.harness import (
    SCALE,
    Case,
    after_steps,
    assert_equal,
    everything,
    gradient_of,
    layout_of,
    schedule,
)
from tests.pipeline.test_arena import WINDOW, layout_of_eight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Two buffers serve eleven tasklets, some with many parameters, so every slot is reused many times.
SMALL_RING = Case(num_buffers=2, compute_threads=2, shapes=(*Case().shapes, (50_000, 3, 1, 3), (3, 0, 0, 3)))


@pytest.fixture
def link(fake_cuda: FakeCuda) -> Iterator[FakeLink]:
    link = FakeLink(fake_cuda)
    yield link
    link.close()


@pytest.fixture
def start(tmp_path: Path, link: FakeLink) -> Iterator[Callable[[Case], CudaRun]]:
    """A function that starts runs on the device. All of them are closed at the end."""
    runs: list[CudaRun] = []

    def start(case: Case) -> CudaRun:
        runs.append(CudaRun(tmp_path / f"device-{len(runs)}", case, link))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    ("dtype", "state_format"), [*((dtype, "fp32") for dtype in DTYPES), (torch.bfloat16, "int8_remainder")]
)
@pytest.mark.parametrize(("seed", "cache_bytes"), long_but([(2, 200_000)], [(0, 0), (1, 0), (2, 200_000)]))
def test_steps_and_rollbacks_give_the_bits_of_the_host(
    tmp_path: Path,
    start: Callable[[Case], CudaRun],
    fake_cuda: FakeCuda,
    dtype: torch.dtype,
    state_format: str,
    seed: int,
    cache_bytes: int,
) -> None:
    """Steps and rollbacks on the device give the same state and partition as in host memory.

    This holds for any delay of copies and storage, and for any amount of state in memory.
    """
    case = SMALL_RING.but(dtype=dtype, gradient_dtype=dtype, state_format=state_format)
    expected = after_steps(tmp_path / "host", case)
    fake_cuda.delay(seed, 2_000)
    run = start(case.but(cache_bytes=cache_bytes))
    inject(run.device.pipeline, seed=seed, max_delay_us=1_000)
    for number in range(3):
        before = run.state()
        run.handler.begin_step(run.collect(1))
        run.handler.step.wait(slice(0, 1 + 3 * number))
        run.roll_back_to(before)
        run.step(number)
    assert_equal(run.state(), expected)


@pytest.mark.parametrize(("dtype", "read_bytes"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_fp32_parameters_on_the_device_are_the_masters(
    start: Callable[[Case], CudaRun], link: FakeLink, dtype: torch.dtype, read_bytes: int
) -> None:
    """An fp32 partition on the device is the master, as in host memory, so only the moments are read.

    Copies come after what the user's stream still writes to parameters.
    """
    run = start(Case(dtype=dtype, shapes=((20_480, 0, 0, 0),)))
    before = run.handler.traffic()
    run.step(1)
    assert (run.handler.traffic() - before).shared_read_bytes == read_bytes * 20_480 + 5 * 4096
    plan, written = run.collect(2), torch.full_like(run.partition[0], 3.0)
    link.fake.kernel(
        link.user_stream, *(each.view(torch.float32).numpy() for each in (run.partition[0], written)), us=30_000
    )
    run.update(plan)
    assert bool((run.partition[0] - 3.0).abs().max() < 0.5) == (dtype == torch.float32)


def test_copies_and_the_users_stream_are_in_order(start: Callable[[Case], CudaRun], link: FakeLink) -> None:
    """The user's stream reads old parameters before an update, updated ones after wait(), and so before a rollback.

    The host has waited for none of the copies.
    """
    stepped, run = start(Case()), start(Case())
    stepped.step(1)
    before, plan = torch.cat(run.partition), run.collect(1)
    seen_before = [link.copy(tensor, us=30_000) for tensor in run.partition]
    link.fake.delay(5, 20_000)
    run.handler.begin_step(plan)
    run.handler.step.wait()
    seen = [link.copy(tensor, us=30_000) for tensor in run.partition]
    run.handler.roll_back()
    link.fake.wait(link.user_stream)
    assert torch.equal(torch.cat(seen_before), before) and torch.equal(torch.cat(run.partition), before)
    assert torch.equal(torch.cat(seen), torch.cat(stepped.partition)) and not torch.equal(torch.cat(seen), before)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Is called for each sum of squares that was not computed as its gradient arrived."""
    counted = Mock(wraps=native.sum_of_squares)
    monkeypatch.setattr(native, "sum_of_squares", counted)
    return counted


def test_arrivals_do_not_wait_for_the_device(link: FakeLink, summed: Mock) -> None:
    """Gradients arrive while the device is busy without a wait. The norm waits for the gradients only.

    They travel in their own dtype, on a stream of their own, and are squared beside that. No stream of the user waits,
    and nothing goes back to the device. A gradient that replaces one in flight is not overwritten.
    """
    arena = GradientArena(layout_of(Case()), link=link)
    arena.buffer.fill_(math.nan)
    gradients = [torch.randn(12_000, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3)]
    link.fake.delay(1, 20_000)
    link.fake.clear()
    gate = link.fake.gate(link.user_stream)
    arena.arrive(1, link.on_device(gradients[0]))
    link.use_other_stream()
    for gradient in gradients[1:]:
        arena.arrive(1, link.on_device(gradient))
    assert arena.gradient(1).isnan().all()
    link.fake.open(gate)
    busy = link.fake.gate(link.user_stream)  # further work on the stream
    total = gradients[0].float() + gradients[1] + gradients[2]
    assert arena.sum_of_squares() == pytest.approx(total.double().square().sum().item(), rel=1e-12)
    assert torch.equal(arena.gradient(1), total)
    copies = [line.split() for line in link.fake.log() if line.startswith("cuMemcpy")]
    assert {copy[0] for copy in copies} == {"cuMemcpyDtoHAsync_v2"}
    assert sum(int(copy[2]) for copy in copies) == 3 * 12_000 * 2
    assert len({copy[3] for copy in copies}) == 1
    of_user = {f"stream={stream}" for stream in link.streams}
    assert not of_user & {copy[3] for copy in copies}
    assert not [line for line in link.fake.log() if line.startswith("cuStreamWaitEvent") and line.split()[1] in of_user]
    link.fake.open(busy)
    arena.arrive(1, link.on_device(gradients[0]))
    arena.replace(1, gradients[1].float())  # from the host
    assert arena.sum_of_squares() == pytest.approx(gradients[1].double().square().sum().item(), rel=1e-12)
    summed.assert_called_once()
    arena.close()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("arena_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_gradients_from_the_device_get_the_bits_of_the_host(
    link: FakeLink, summed: Mock, arena_dtype: torch.dtype, dtype: torch.dtype, num_threads: int
) -> None:
    """Gradients from the device, its other streams and the host add up to the host's bits in any order.

    So do the sums of their squares, whatever the number of pieces and threads.
    """
    shapes = ((2_300_000, 1, 0, 0), (7, 0, 0, 0))  # the first does not fit into a slot
    layout = layout_of(Case(shapes=shapes, tasklet_bytes=1 << 20))
    host = GradientArena(layout, dtype=arena_dtype)
    device = GradientArena(layout, dtype=arena_dtype, link=link, num_threads=num_threads)
    link.fake.delay(1, 300)
    for number in range(5):
        for parameter in (0, 1):
            values = torch.randn(
                layout.parameters[parameter].real_numel, generator=torch.Generator().manual_seed(number)
            ).to(dtype)
            host.arrive_all([parameter], [values])
            # Of each parameter a different gradient comes from the host.
            on_host = number == 3 * parameter
            device.arrive_all([parameter], [values if on_host else link.on_device(torch._neg_view(-values))])
        if number == 2:
            link.use_other_stream()
    summed.reset_mock()
    assert device.sum_of_squares() == host.sum_of_squares()
    assert torch.equal(device.buffer, host.buffer)
    summed.assert_called_once()  # by the host's arena, for a gradient with padding
    host.close()
    device.close()


def test_backward_waits_for_a_device_that_is_far_behind(link: FakeLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes may be on their way at once: then the wait is counted, and an interrupt ends it without a loss."""
    monkeypatch.setattr(arriving_gradients, "MOST_ON_DEVICE_BYTES", 100_000)
    arena = GradientArena(layout_of(Case()), link=link)
    gradients = [link.on_device(torch.full((12_000,), float(value))) for value in (1, 2, 4, 8)]
    gate = link.fake.gate(link.user_stream)
    for gradient in gradients[:2]:
        arena.arrive(1, gradient)
    assert arena.wait_seconds == 0
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        arena.arrive(1, gradients[2])
    threading.Timer(0.2, link.fake.open, (gate,)).start()
    arena.arrive(1, gradients[3])
    assert arena.wait_seconds > 0
    arena.synchronize()
    assert (arena.gradient(1) == 11).all()
    arena.close()


def test_gradients_with_a_budget_do_not_wait(link: FakeLink, tmp_path: Path) -> None:
    """Windows that gradients are on their way into stay in memory. If all are, the first is waited for, and spilled."""
    layout, store = layout_of_eight(), TensorStore([tmp_path], job="test", direct_io="auto")
    memory = GradientWindows(layout, torch.float32, budget_bytes=3 * WINDOW, store=store, await_use=lambda _: None)
    arena = GradientArena(layout, link=link, memory=memory)
    link.fake.delay(1, 5_000)
    for number in range(2):
        gate = link.fake.gate(link.user_stream)
        for parameter in range(8):
            if parameter == 3:  # there is room for three
                link.fake.open(gate)
            arena.arrive(parameter, link.on_device(torch.full((4096,), 1.0 + parameter + number)))
            assert memory.memory_bytes <= memory.budget_bytes
    expected = [3.0 + 2 * parameter for parameter in range(8)]
    assert arena.sum_of_squares() == 4096 * sum(value**2 for value in expected)
    assert [bool((arena.gradient(index) == value).all()) for index, value in enumerate(expected)] == [True] * 8
    assert arena.take_failure() is None
    assert memory.counters().written_bytes >= 5 * WINDOW
    arena.close()


def begun_within_backward(run: CudaRun, number: int) -> StepPlan:
    """Begin a step before its gradients have come."""
    run.arena.reset()
    schedule(run.optimizer, number)
    plan = everything(run.plan())
    run.handler.begin_incremental(plan)
    return plan


def send_all(run: CudaRun, number: int) -> None:
    """Let all gradients of a step come, of which no parameter lacks one."""
    for index in range(len(run.parameters)):
        run.send(index, gradient_of(run.case, index, number) * SCALE)


def backward_on(run: CudaRun, number: int, random: np.random.Generator) -> Iterator[list[int]]:
    """Let a step's gradients arrive in a random order, from several streams; yield the tasklets that each completes.

    The device computes a gradient, and copies it, when the host has gone on.
    """
    missing = run.layout.num_parameters_in.tolist()
    for index in map(int, random.permutation(len(run.parameters))):
        if random.random() < 0.3:
            run.link.use_other_stream()
        computed = run.link.on_device(gradient_of(run.case, index, number) * SCALE)
        run.arena.arrive(index, run.link.copy(computed, us=int(random.integers(3_000))))
        complete = []
        for tasklet in run.layout.tasklets_of(slice(index, index + 1)):
            missing[tasklet] -= 1
            if missing[tasklet] == 0:
                complete.append(tasklet)
        yield complete


@pytest.mark.parametrize("home", ["device", "host", "staged"])
@pytest.mark.parametrize(
    ("dtype", "seed"), long_but([(torch.float32, 0), (torch.bfloat16, 1)], itertools.product(DTYPES, range(20)))
)
def test_updates_within_backward_give_the_bits_of_the_host(
    tmp_path: Path, link: FakeLink, fake_cuda: FakeCuda, home: str, dtype: torch.dtype, seed: int
) -> None:
    """Tasklets are added while their gradients still travel and the device still uses the parameters."""
    case = SMALL_RING.but(dtype=dtype, cache_bytes=200_000 * (seed % 2), staged=home == "staged", all_active=True)
    expected = after_steps(tmp_path / "host", case)
    random, run = np.random.default_rng(seed), CudaRun(tmp_path / "device", case, link, on_device=home == "device")
    fake_cuda.delay(seed, 500)
    inject(run.device.pipeline, seed=seed, max_delay_us=1_000)
    for number, is_taken in ((0, False), (0, True), (1, True), (2, False), (2, True)):
        before = run.state()
        plan = begun_within_backward(run, number)
        seen = [run.link.copy(tensor, us=5_000) for tensor in run.partition if dtype == torch.float32]
        for complete in backward_on(run, number, random):
            if complete:
                run.handler.step.extend(complete)
        if is_taken:
            assert run.handler.step.complete(plan)
            run.handler.commit()
        else:
            run.roll_back_to(before)
        run.link.wait()
        assert not seen or torch.equal(torch.cat(seen), before["partition"])
    assert_equal(run.state(), expected)
    run.close()


def test_an_update_waits_for_every_stream(start: Callable[[Case], CudaRun], link: FakeLink) -> None:
    """Nothing of a tasklet is computed, and no parameter changes, as long as a stream is busy that may use it."""
    run = start(Case(all_active=True))
    before = [tensor.clone() for tensor in run.partition]
    plan = begun_within_backward(run, 1)
    busy = link.fake.gate(link.user_stream)
    link.use_other_stream()  # on which gradients are copied
    send_all(run, 1)
    run.handler.step.extend(list(range(len(run.layout.tasklets))))
    assert run.handler.step.complete(plan)
    computed = run.handler.traffic().compute_seconds
    time.sleep(0.2)
    assert run.handler.traffic().compute_seconds == computed
    assert all(torch.equal(now, then) for now, then in zip(run.partition, before, strict=True))
    link.fake.open(busy)
    run.handler.commit()
    assert not torch.equal(run.partition[0], before[0])


def test_a_stream_that_is_used_no_more_is_not_asked(link: FakeLink) -> None:
    """A user may destroy a stream: it is left out once two steps have begun without it."""
    link.notice()
    link.use_other_stream()
    link.current_stream()
    assert len(link.points()) == 2
    link.notice()
    assert len(link.points()) == 2
    link.notice()
    assert len(link.points()) == 1
    link.points()


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventSynchronize", "cuEventCreate"])
def test_a_failure_within_backward(start: Callable[[Case], CudaRun], link: FakeLink, call: str) -> None:
    """The step fails by the driver's error, is rolled back, and can be repeated."""
    run = start(Case(all_active=True))
    run.step(0)
    before = run.state()
    plan = begun_within_backward(run, 1)
    send_all(run, 1)
    run.arena.sum_of_squares()

    def take() -> None:
        run.handler.step.extend(list(range(len(run.layout.tasklets))))
        run.handler.step.complete(plan)
        run.handler.commit()

    link.fake.fail(call)
    with pytest.raises(CudaError, match=call):
        take()
    link.fake.reset()
    run.roll_back_to(before)
    run.step(1)


def test_no_step_waits_for_the_device_as_a_whole(start: Callable[[Case], CudaRun], link: FakeLink) -> None:
    """Backward waits for nothing, the norm for an event of each gradient, the update for the events of its tasklets.

    Parameters of a tasklet that are side by side in memory travel as one copy.
    """
    run = start(SMALL_RING.but(dtype=torch.bfloat16))
    link.fake.clear()
    run.handler.begin_step(run.collect(1))
    run.handler.step.wait()
    run.handler.commit()
    run.handler.begin_step(run.collect(2))
    run.handler.roll_back()
    calls = link.fake.calls()
    waits = 2 + 2 * len(run.layout.parameters) + 3 * len(run.layout.tasklets)
    assert not set(calls) & set(SYNCHRONOUS) and calls.count("cuEventSynchronize") <= waits
    assert calls.count("cuMemcpyHtoDAsync_v2") >= len(run.layout.tasklets)
    small = start(Case(shapes=((3, 0, 0, 0),) * 200, dtype=torch.bfloat16))
    link.fake.clear()
    small.handler.begin_step(small.collect(1))
    small.handler.roll_back()
    # Two of three neighbours have a gradient, and both are in one parameter group.
    assert link.fake.calls().count("cuMemcpyHtoDAsync_v2") <= 2 * 67


TRAVEL_FAULTS: dict[str, tuple[Callable[[CudaRun, int], None], type[Exception], str]] = {
    "a refused copy": (
        lambda run, number: run.link.fake.fail("cuMemcpyHtoDAsync_v2", skipped=3 * number),
        CudaError,
        r"tasklet \d+ failed: cuMemcpyHtoDAsync_v2 .*\(2\): out of memory",
    ),
    "a read": (lambda run, number: inject(run.device.pipeline, fail_read_at=3 + number), StorageError, "tasklet"),
    "a write": (lambda run, number: inject(run.device.pipeline, fail_write_at=3 + number), StorageError, "tasklet"),
}


@pytest.mark.parametrize("name", TRAVEL_FAULTS)
def test_what_fails_while_parameters_travel(start: Callable[[Case], CudaRun], link: FakeLink, name: str) -> None:
    """The commit raises the error, no slot is used again before the copies from it have ended, and nothing changes."""
    fail, error, told = TRAVEL_FAULTS[name]
    run = start(SMALL_RING)
    before = run.state()
    link.fake.delay(9, 3_000)
    for number in range(3):
        plan = run.collect(number)
        fail(run, number)
        run.handler.begin_step(plan)
        with pytest.raises(error, match=told):
            run.handler.commit()
        inject(run.device.pipeline)
        run.roll_back_to(before)
    run.step(3)


@pytest.mark.parametrize("skipped", [0, 3, 8])
def test_a_lost_device_is_reported_and_left(start: Callable[[Case], CudaRun], link: FakeLink, skipped: int) -> None:
    """A copy that fails on its stream fails the commit and the rollback. The state on storage stays intact."""
    run = start(SMALL_RING.but(dtype=torch.bfloat16))
    generation = run.handler.generation
    expected = run.read()
    plan = run.collect(1)
    link.fake.fail_copy(skipped=skipped)
    run.handler.begin_step(plan)
    with pytest.raises(CudaError, match=r"\(700\).*nvidia-smi"):
        run.handler.commit()
    with pytest.raises(CudaError, match="700"):
        run.handler.roll_back()
    run.handler.close(remove=False)
    assert run.handler.generation == generation
    again = CudaRun.__mro__[1](run.folders[0].parent, run.case, recover=True)
    for found, kept in zip(again.read(), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    again.close()


LOST = ["cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventCreate", "cuStreamWaitEvent", "a copy on its stream"]


@pytest.mark.parametrize("fault", LOST)
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_lost_gradient_is_reported_where_it_is_read(link: FakeLink, fault: str, skipped: int) -> None:
    """Backward goes on. The norm raises, and the next window is whole, unless the stream has failed.

    close() unregisters the memory all the same.
    """
    layout = layout_of(Case(shapes=((600_000, 0, 0, 0), (7, 0, 0, 0))))  # the first travels in two pieces
    arena = GradientArena(layout, link=link, num_threads=2)
    is_refused = fault in LOST[:-1]
    link.fake.fail(fault, skipped=skipped) if is_refused else link.fake.fail_copy(skipped=skipped)
    gradients = [link.on_device(torch.ones(parameter.numel)) for parameter in layout.parameters]
    for parameter, gradient in enumerate(gradients):
        arena.arrive(parameter, gradient)
    with pytest.raises(CudaError, match=fault if is_refused else "cuEventSynchronize"):
        arena.sum_of_squares()
    arena.reset()
    for parameter, gradient in enumerate(gradients):
        arena.arrive(parameter, gradient)
    if is_refused:
        assert arena.sum_of_squares() == 600_007
    arena.close()
    assert link.fake.held()["registered"] == 0


@pytest.mark.parametrize("skipped", [0, 1])
def test_memory_that_cannot_be_registered_warns_once(tmp_path: Path, link: FakeLink, skipped: int) -> None:
    """If the ring of gradients or the slots cannot be registered, one warning says so, and results are the same."""
    link.fake.fail("cuMemHostRegister_v2", skipped=skipped)
    with pytest.warns(UserWarning, match=r"CUDA device 0.*cuMemHostRegister_v2.*out of memory.*ulimit -l"):
        run = CudaRun(tmp_path / "device", SMALL_RING, link)
    with warnings.catch_warnings(action="error"):
        run.steps(range(3))
    assert_equal(run.state(), after_steps(tmp_path / "host", SMALL_RING))
    run.close()


def test_exactly_the_ring_of_gradients_and_the_slots_are_registered(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """Every copy is within the registered slots: those of gradients, or one for each buffer of the state's ring.

    The arena and that ring are not registered. After close() nothing is registered. With the last reference events,
    streams and the context are released.
    """
    before = fake_cuda.held()  # by tests whose device has failed
    link = FakeLink(fake_cuda)
    fake_cuda.clear()
    run = CudaRun(tmp_path, SMALL_RING.but(dtype=torch.bfloat16), link)
    run.steps(range(2))
    run.handler.begin_step(run.collect(1))
    run.handler.roll_back()
    run.read()
    ring_bytes = SMALL_RING.num_buffers * max(extent.nbytes for extent in run.layout.extents.extents)
    slots_bytes = run.handler.ring_bytes - ring_bytes
    gradients_bytes = run.arena.ring_bytes
    run.close()
    registered: dict[int, int] = {}
    seen, num_copies = [], 0
    for call, *numbers in map(str.split, fake_cuda.log()):
        address, nbytes = [*map(int, filter(str.isdigit, numbers)), 0, 0][:2]
        if call == "cuMemHostRegister_v2":
            registered[address] = nbytes
            seen.append((address, nbytes))
        elif call == "cuMemHostUnregister":
            del registered[address]
        elif call.startswith("cuMemcpy"):
            num_copies += 1
            assert any(begin <= address and address + nbytes <= begin + size for begin, size in registered.items())
    assert not registered and num_copies > 2 * len(run.layout.tasklets)
    assert [size for _, size in seen] == [gradients_bytes, whole_blocks(slots_bytes)]
    parameters_bytes = 2 * run.layout.extents.tasklet_numel
    assert parameters_bytes <= slots_bytes / SMALL_RING.num_buffers < parameters_bytes + 4096
    link.close()
    del run, link
    gc.collect()
    assert fake_cuda.held() == before
