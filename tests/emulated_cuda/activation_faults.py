"""Orders and failures of copies of activations, in a process that has the emulated device.

``tests/emulated_cuda/test_device.py`` runs this file.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.activations.cuda.copies import _Direction, _streams
from lightning_smartinfinity.activations.writes import Writes
from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink, link_to
from tests.activations import chains
from tests.activations.chains import BLOCK
from tests.activations.models import drop_memory, everything, opened
from tests.helpers.native_testing import Hold
from tests.helpers.waiting import await_that
from tests.native.fake_cuda import SYNCHRONOUS, FakeCuda

ENTRIES = 8
TIGHT = everything(host_bytes=3 * BLOCK, budget_bytes=4 * BLOCK)
saved, assert_right, expected = (
    partial(call, length=ENTRIES + 1) for call in (chains.saved, chains.assert_right, chains.expected)
)
CALLS = [
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
]


@pytest.fixture
def driver() -> Iterator[FakeCuda]:
    """The driver of the emulated device, without delays."""
    fake = FakeCuda(Path(os.environ["SMART_INFINITY_EMULATED_CUDA"]))
    fake.reset()
    with torch.device("cuda"):
        yield fake
    fake.reset()


@pytest.fixture
def link() -> CudaLink:
    found = link_to(torch.device("cuda", 0))
    assert found is not None
    return found


@pytest.fixture
def streams(link: CudaLink) -> Iterator[tuple[int, int]]:
    """Streams that only this test uses, since those that failed do nothing more."""
    before = _streams(link)
    _streams.cache_clear()
    out, into = _streams(link)
    yield out.handle, into.handle
    _KEPT.extend([before, (out, into)])  # the device may ask for them as long as the process lives
    _streams.cache_clear()


_KEPT: list[object] = []


def gradient(x: torch.Tensor, loss: torch.Tensor, *, retain: bool = False) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, x, retain_graph=retain)
    return found


def choose_first(offloaded: OffloadedActivations) -> None:
    """Run micro-batches until it is chosen what is offloaded. Those before are measured."""
    while offloaded.choice is None:
        assert_right(*saved(offloaded))


def whole(offloaded: OffloadedActivations) -> bool:
    gc.collect()
    return offloaded.held_bytes == 0


@contextmanager
def stopped_until_awaited(driver: FakeCuda, stream: int) -> Iterator[None]:
    """Stop the stream of copies out until the host begins to wait for one, which it has to, however slow it is."""
    gate, finish = driver.gate(stream), Writes._finish_copy
    with ExitStack() as stopped:
        stopped.callback(driver.open, gate)

        def finish_copy(writes: Writes) -> bool:
            stopped.close()
            return finish(writes)

        with patch.object(Writes, "_finish_copy", finish_copy):
            yield


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails(tmp_path: Path, driver: FakeCuda, streams: tuple[int, int], call: str) -> None:
    """Whichever call it is, nothing is lost: a retained graph is run again, and later steps are right.

    The failure is told once, and nothing more is offloaded.
    """
    num_failures, skipped = 0, 0
    while True:
        with opened(tmp_path, TIGHT) as offloaded, warnings.catch_warnings(record=True, action="always") as told:
            driver.clear()
            driver.fail(call, skipped=skipped)
            with stopped_until_awaited(driver, streams[0]):
                x, loss = saved(offloaded)
            try:
                found = gradient(x, loss, retain=True)
            except CudaError as error:
                assert f"{call} failed" in str(error) and "Entry" in str(error) and error.remedy
                found = gradient(x, loss)
            assert torch.equal(found, expected(x))
            has_failed = driver.calls().count(call) > skipped
            driver.reset()
            assert_right(*saved(offloaded))
            failure = offloaded.take_failure()
            assert offloaded._store.writes.stopped == (failure is not None) == (len(told) == 1)
            assert has_failed == (failure is not None)
            if failure is None:
                break  # there were not so many calls
            assert isinstance(failure, CudaError) and "stays in memory from now on" in str(told[0].message)
        num_failures, skipped = num_failures + 1, skipped + 1
    assert num_failures >= ENTRIES // 2


@pytest.mark.parametrize("at", range(ENTRIES))
def test_a_copy_from_the_device_that_fails(tmp_path: Path, driver: FakeCuda, streams: tuple[int, int], at: int) -> None:
    """The entry of a failed copy is gone, so backward raises each time, and never gives a wrong gradient."""
    with opened(tmp_path, everything()) as offloaded, pytest.warns(UserWarning, match="stays in memory from now on"):
        choose_first(offloaded)
        driver.fail_copy(skipped=at)
        x, loss = saved(offloaded)
        driver.wait(streams[0])
        for _ in range(2):
            with pytest.raises(CudaError, match=r"^Entry \d+ of") as raised:
                gradient(x, loss, retain=True)
            assert int(str(raised.value).split()[1]) >= at
        assert isinstance(offloaded.take_failure(), CudaError)
        assert_right(*saved(offloaded))


def test_memory_that_cannot_be_registered(tmp_path: Path, driver: FakeCuda, link: CudaLink) -> None:
    """Copies block then, and there is one warning."""
    link._warned = False
    driver.fail("cuMemHostRegister_v2")
    with opened(tmp_path, TIGHT) as offloaded:
        with pytest.warns(UserWarning, match="could not be registered with CUDA device 0"):
            x, loss = saved(offloaded)
        assert_right(x, loss)


def test_a_failure_that_is_noted(tmp_path: Path, driver: FakeCuda) -> None:
    """Where other ranks would wait, backward goes on with NaN, and the failure is kept."""
    with opened(tmp_path, everything(), notes_failures=True) as offloaded, pytest.warns(match="from now on"):
        x, loss = saved(offloaded)
        driver.fail("cuMemcpyHtoDAsync_v2")
        assert gradient(x, loss).isnan().all()
        assert isinstance(offloaded.take_failure(), CudaError)


def test_memory_of_the_device_is_not_used_before_its_copy(
    tmp_path: Path, driver: FakeCuda, streams: tuple[int, int]
) -> None:
    """Memory that forward drops goes to others only after its copy; here, copies begin after others were computed."""
    with opened(tmp_path) as offloaded:
        choose_first(offloaded)
        gate = driver.gate(streams[0])
        x, loss = saved(offloaded)
        others = [torch.full((BLOCK // 4,), 5.0) for _ in range(3 * ENTRIES)]
        torch.cuda.current_stream().synchronize()
        driver.open(gate)
        del others
        assert_right(x, loss)


def test_memory_of_the_pool_that_copies_use(tmp_path: Path, driver: FakeCuda, streams: tuple[int, int]) -> None:
    """It is not lent to others before the copies have run, in neither direction, even if their graph is gone."""
    with opened(tmp_path) as offloaded:
        choose_first(offloaded)
        for stream in streams:
            await_that(lambda: whole(offloaded))
            gate = driver.gate(stream)
            x, loss = saved(offloaded)
            found = gradient(x, loss)
            assert not whole(offloaded)
            driver.open(gate)
            assert torch.equal(found, expected(x))
        await_that(lambda: whole(offloaded))


def test_memory_that_earlier_work_uses(tmp_path: Path, driver: FakeCuda) -> None:
    """A copy to the device waits for work of the current stream, whose memory the allocator may have lent again."""
    with opened(tmp_path) as offloaded:
        x, loss = saved(offloaded)
        drop_memory(offloaded)
        others = [torch.full((BLOCK // 4,), float(i)) for i in range(ENTRIES)]
        torch.cuda._sleep(10**8)
        sums = [other.sum() for other in others]
        del others
        assert_right(x, loss)
        assert [int(each) for each in sums] == [i * BLOCK // 4 for i in range(ENTRIES)]


def test_what_was_loaded_ahead_and_dropped(tmp_path: Path, driver: FakeCuda, streams: tuple[int, int]) -> None:
    """The memory of a load that was dropped is given to others only after the copy into it."""
    with opened(tmp_path) as offloaded:
        choose_first(offloaded)
        x = torch.linspace(0, 1, BLOCK // 4, requires_grad=True)
        with offloaded.forward(x):
            y = x.sin().sin().sin().sin()
            graph = [y, y.sin().sum()]
        del y
        gradient(*graph, retain=True)  # and reads others ahead
        gate = driver.gate(streams[1])

        def are_loaded() -> bool:
            gradient(*graph, retain=True)
            return offloaded._store.loads.nbytes > 2 * BLOCK

        await_that(are_loaded)
        graph.clear()
        gc.collect()
        others = [torch.full((BLOCK // 4,), 5.0) for _ in range(ENTRIES)]
        torch.cuda.current_stream().synchronize()
        driver.open(gate)
        driver.wait(streams[1])
        assert all(bool((other == 5).all()) for other in others)


def interrupt_behind_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an interrupt come behind the start of the next copy."""
    record = _Direction.record

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(_Direction, "record", record)
        raise KeyboardInterrupt

    monkeypatch.setattr(_Direction, "record", interrupt)


@pytest.mark.parametrize("way", ["out", "in"])
def test_an_interrupt_behind_the_start_of_a_copy(
    tmp_path: Path, driver: FakeCuda, streams: tuple[int, int], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The memory of pool and device is not given to others before the copy has run. Backward can be run again."""
    with opened(tmp_path) as offloaded:
        choose_first(offloaded)
        await_that(lambda: whole(offloaded))
        graph = saved(offloaded) if way == "in" else None
        gate = driver.gate(streams[way == "in"])
        interrupt_behind_start(monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            gradient(*graph, retain=True) if graph else saved(offloaded)
        assert not whole(offloaded)
        others = [torch.full((BLOCK // 4,), 5.0) for _ in range(ENTRIES)]
        torch.cuda.current_stream().synchronize()
        driver.open(gate)
        driver.wait(streams[way == "in"])
        assert all(bool((other == 5).all()) for other in others)
        assert_right(*(graph or saved(offloaded)))
        graph = None
        await_that(lambda: whole(offloaded))


def test_an_interrupt_when_the_host_waits_for_a_copy(
    tmp_path: Path, driver: FakeCuda, streams: tuple[int, int]
) -> None:
    """The memory is kept, and the next wait is for the same copy."""
    with opened(tmp_path) as offloaded:
        choose_first(offloaded)
        await_that(lambda: whole(offloaded))
        gate = driver.gate(streams[0])
        saved(offloaded)
        (copies,) = offloaded._store.devices._all()
        event, memory = copies._out._kept[0]
        point = Mock(done=event.done, synchronize=Mock(side_effect=[KeyboardInterrupt, None]))
        copies._out._kept[0] = point, memory
        with pytest.raises(KeyboardInterrupt):
            offloaded.close()
        assert copies._out._kept[0] == (point, memory)
        driver.open(gate)
        driver.wait(streams[0])


def test_a_host_that_is_ahead(tmp_path: Path, driver: FakeCuda) -> None:
    """If the pool has no room, forward waits until the device has computed what is evicted, but not for storage."""
    with opened(tmp_path, everything(host_bytes=2 * BLOCK)) as offloaded:
        choose_first(offloaded)
        await_that(lambda: whole(offloaded))  # and no request is in flight
        hold = Hold(offloaded._store.files.tensors.core, write_at=0, count=1000)
        torch.cuda._sleep(10**9)
        x, loss = saved(offloaded)
        (forward,) = offloaded._store.eviction._forwards
        oldest = forward.oldest()
        assert oldest is not None and all(point.done() for point in oldest._points.values())
        hold.release()
        assert_right(x, loss)


@pytest.mark.parametrize("settings", [everything(), TIGHT], ids=["roomy", "tight"])
def test_everything_comes_back(tmp_path: Path, driver: FakeCuda, settings: ActivationOffload) -> None:
    """After steps with delays, the pool is idle, and registered once; nothing waits for a whole stream."""
    driver.delay(3, 1000)
    with opened(tmp_path, settings) as offloaded:
        for _ in range(5):
            assert_right(*saved(offloaded))
            await_that(lambda: whole(offloaded))
        assert settings is not TIGHT or offloaded.host_bytes <= 3 * BLOCK
    calls = driver.calls()
    assert settings is TIGHT or calls.count("cuMemHostRegister_v2") == 1
    assert not set(SYNCHRONOUS) & set(calls)


def test_copies_that_are_slower_than_forward(
    tmp_path: Path, driver: FakeCuda, streams: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward does not wait for them. Tensors stay instead, so that few of them are in copies."""
    monkeypatch.setattr("lightning_smartinfinity.activations.pool._LEAST_UNDER_WAY_BYTES", 0)
    with opened(tmp_path, everything()) as offloaded:
        choose_first(offloaded)
        gate = driver.gate(streams[0])
        before = offloaded.traffic()
        x, loss = saved(offloaded)
        after = offloaded.traffic()
        driver.open(gate)
        assert after.offloaded_bytes - before.offloaded_bytes == 2 * BLOCK
        assert after.kept_for_room_bytes - before.kept_for_room_bytes == (ENTRIES - 2) * BLOCK
        assert_right(x, loss)
