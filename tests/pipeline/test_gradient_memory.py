"""Memory for gradients that holds a budget of bytes: what is spilled comes back, and a step finds it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import StorageFullError, UnsupportedError, native
from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientWindows
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout, build_layout
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore

WINDOW = 4096 * 4


def layout_of_eight() -> PartitionLayout:
    """Return a layout with a parameter for each of eight tasklets."""
    slices = [ParameterSlice(name=str(i), numel=4096, real_numel=4096, group=0, sub_group=0) for i in range(8)]
    return build_layout(slices, tasklet_bytes=64 << 10, num_arrays=3, num_devices=1, places_per_tasklet=2)


@pytest.fixture
def awaited() -> list[int]:
    """The windows whose use by an update was waited for."""
    return []


@pytest.fixture
def memory(tmp_path: Path, awaited: list[int]) -> Iterator[GradientWindows]:
    """Memory for eight windows that holds three."""
    store = TensorStore([tmp_path], job="test", direct_io="auto")
    made = GradientWindows(
        layout_of_eight(), torch.float32, budget_bytes=3 * WINDOW, store=store, await_use=awaited.append
    )
    yield made
    made.close()


def fill(memory: GradientWindows, window: int, value: float) -> None:
    begin, end = window * 4096, (window + 1) * 4096
    memory.hold([(begin, end)], changes=True)
    memory.tensor[begin:end] = torch.arange(4096) + value


def content(memory: GradientWindows, window: int) -> torch.Tensor:
    begin, end = window * 4096, (window + 1) * 4096
    memory.hold([(begin, end)], changes=False)
    return memory.tensor[begin:end].clone()


def test_memory_is_given_back(memory: GradientWindows) -> None:
    """Dropped windows take up no page, as the kernel's map of this process shows."""
    for window in range(8):
        fill(memory, window, window)
    memory.hold([(0, 3 * 4096)], changes=False)  # nothing is being written any more
    assert resident_bytes(memory.tensor) <= memory.budget_bytes
    memory.reset()
    assert resident_bytes(memory.tensor) == 0


def test_memory_is_given_back_in_granules() -> None:
    """A granule goes back when none of its blocks is taken."""
    memory = native.GradientMemory(8 * 4096, granule=2 * 4096)
    tensor = torch.frombuffer(memory.memoryview(), dtype=torch.uint8)
    memory.take(0, 5 * 4096)
    tensor[: 5 * 4096] = 1
    memory.drop(4096, 4096)  # block 0 of the same granule is still taken
    assert resident_bytes(tensor) == 5 * 4096 and bool((tensor[:4096] == 1).all())
    memory.drop(0, 3 * 4096)
    assert resident_bytes(tensor) == 3 * 4096, "block 3 is still taken"
    memory.take(4096, 4096)
    tensor[4096 : 2 * 4096] = 2
    memory.drop(2 * 4096, 3 * 4096)
    assert resident_bytes(tensor) == 4096 and bool((tensor[4096 : 2 * 4096] == 2).all())


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor's memory take up memory, by the kernel's map of this process."""
    begin, end, found = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0
    with open("/proc/self/pagemap", "rb") as pages:
        for address in range(begin, end, 4096):
            pages.seek(address // 4096 * 8)
            found += 4096 * (pages.read(8)[7] >> 7)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_use(memory: GradientWindows, seed: int) -> None:
    """Random reads, changes and resets find what was written last, and no more than the budget is in memory.

    One call may need more than the budget; the next one is within it again.
    """
    chosen, expected = random.Random(seed), {}
    for step in range(300):
        window, kind = chosen.randrange(8), chosen.random()
        if kind < 0.05:
            memory.hold([(0, 5 * 4096)], changes=True)
            memory.tensor[: 5 * 4096] = torch.arange(4096).repeat(5) + step
            expected |= dict.fromkeys(range(5), step)
            assert memory.memory_bytes >= 5 * WINDOW
            continue
        if kind < 0.5:
            fill(memory, window, step)
            expected[window] = step
        elif kind < 0.98:
            value = expected.get(window)
            wanted = torch.zeros(4096) if value is None else torch.arange(4096) + value
            assert torch.equal(content(memory, window), wanted)
        else:
            memory.reset()
            expected.clear()
        assert memory.memory_bytes <= memory.budget_bytes
    assert memory.take_failure() is None and memory.counters().written_bytes >= 5 * WINDOW


# ---- a step in flight


def test_a_window_that_the_update_needs_stays(memory: GradientWindows, awaited: list[int]) -> None:
    """Before its memory is used for others, it is waited for."""
    for window in range(3):
        fill(memory, window, window)
    steps = [memory.of_step(window, last_use=True) for window in range(3)]
    memory.reset()
    assert memory.memory_bytes == 3 * WINDOW and not any(step.is_used for step in steps)
    fill(memory, 5, 5)
    assert awaited == [0]
    fill(memory, 1, 9)
    assert awaited == [0, 1]


def test_squares_are_known_before_a_gradient_is_given_up(memory: GradientWindows) -> None:
    """A gradient that the core cannot read in one pass is squared when it arrives: later it may be gone."""
    arena = GradientArena(layout_of_eight(), memory=memory)
    gradient = torch.ones(4096, 2)[:, 0]
    arena.arrive(0, gradient)
    arena.arrive(0, gradient)
    arena.of_step(0, last_use=True)
    assert arena.sum_of_squares() == 4 * 4096
    assert arena.take_failure() is None
    arena.gradient(0)
    assert isinstance(arena.take_failure(), UnsupportedError), "it is gone"


def test_no_room_on_storage(memory: GradientWindows, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store has no room, windows stay in memory, and the failure is kept."""

    def full(*_: object) -> None:
        raise StorageFullError("There is no room.", "Free some.")

    monkeypatch.setattr(TensorStore, "add", full)
    for window in range(8):
        fill(memory, window, window)
    assert isinstance(memory.take_failure(), StorageFullError)
    assert all(torch.equal(content(memory, window), torch.arange(4096) + window) for window in range(8))
