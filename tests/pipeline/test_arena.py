"""The gradient arena gives the results of plain accumulation in torch."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity import StorageFullError, UnsupportedError, native
from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.gradients.device_selection import top_k_payload, with_residual
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientWindows
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout, build_layout
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore
from tests.native.stored import Compressing
from tests.pipeline.harness import Case, layout_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUT = layout_of(Case())
REAL = [shape[0] - shape[1] for shape in Case().shapes]


def gradient(parameter: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(REAL[parameter], generator=torch.Generator().manual_seed(100 * seed + parameter)).to(dtype)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exact": lambda value: value,
    "padded": lambda value: torch.cat([value, value.new_full((2,), math.inf)]),
    "short": lambda value: value[: len(value) // 2],
    "empty": lambda value: value[:0],
    "strided": lambda value: torch.stack([value, -value], 1).requires_grad_()[:, 0],
    "expanded": lambda value: value[:1].expand(len(value)),
    "negated": lambda value: torch._neg_view(-value),  # what torch shows, and not what is in memory
}


@given(
    windows=st.lists(st.lists(st.lists(st.integers(0, 6), unique=True, max_size=7), max_size=3), max_size=3),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=7, max_size=7),
    arena_dtype=st.sampled_from(DTYPES),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=7, max_size=7),
)
def test_windows_are_summed_as_in_torch(
    windows: list[list[list[int]]], kinds: list[str], arena_dtype: torch.dtype, dtypes: list[torch.dtype]
) -> None:
    """A window sums its gradients in the arena's dtype, whatever was in memory, alone or together as they arrive.

    A slice's padding is cut off. What a slice lacks is zero, as on a rank that holds padding only. Gradients have the
    values that torch shows, whatever the order of their memory.
    """
    arena = GradientArena(LAYOUT, dtype=arena_dtype)
    arena.buffer.fill_(math.nan)
    for window in windows:
        arena.reset()
        expected: dict[int, torch.Tensor] = {}
        for seed, parameters in enumerate(window):
            arriving = [KINDS[kinds[each]](gradient(each, seed, dtypes[each])) for each in parameters]
            arena.arrive_all(parameters, arriving)
            for parameter, value in zip(parameters, arriving, strict=True):
                total = expected.setdefault(parameter, torch.zeros(REAL[parameter], dtype=arena_dtype))
                numel = min(len(value), len(total))
                total[:numel] += value[:numel].detach()
        assert arena.active.tolist() == [index in expected for index in range(len(REAL))]
        for parameter, total in expected.items():
            stored = arena.gradient(parameter)
            assert torch.equal(stored[: REAL[parameter]], total) and not stored[REAL[parameter] :].any()
        squares = sum(total.double().square().sum().item() for total in expected.values())
        assert arena.sum_of_squares() == pytest.approx(squares, rel=1e-12)
    arena.close()


@pytest.mark.parametrize("change", ["scale", "clamp"])
def test_a_whole_window_is_scaled_and_clamped(change: str) -> None:
    """scale() and clamp() change the gradients that arrived, exactly as one by one, and leave the others alone."""
    arena = GradientArena(LAYOUT)
    arena.buffer.fill_(7.0)
    arrived = [0, 1, 3, 4]
    for parameter in arrived:
        arena.arrive(parameter, gradient(parameter, 0))
    arena.sum_of_squares()
    arena.scale(0.3) if change == "scale" else arena.clamp(0.5)
    squares = 0.0
    for parameter in arrived:
        value = gradient(parameter, 0)
        expected = value * 0.3 if change == "scale" else value.clamp(-0.5, 0.5)
        assert torch.equal(arena.gradient(parameter)[: REAL[parameter]], expected)
        squares += expected.double().square().sum().item()
    assert all((arena.gradient(parameter) == 7.0).all() for parameter in (2, 5, 6))
    assert arena.sum_of_squares() == pytest.approx(squares, rel=1e-12)
    arena.close()


def test_replaced_gradients_forget_what_arrived() -> None:
    """replace() discards the sum so far and makes the parameter active. Later gradients add to it."""
    arena = GradientArena(LAYOUT)
    arena.arrive(3, gradient(3, 1))
    for parameter in (3, 4):
        arena.sum_of_squares()
        arena.replace(parameter, gradient(parameter, 2))
    replaced = sum(gradient(parameter, 2).double().square().sum().item() for parameter in (3, 4))
    assert arena.sum_of_squares() == pytest.approx(replaced, rel=1e-12)
    arena.arrive(3, gradient(3, 3))
    assert arena.active.tolist() == [index in (3, 4) for index in range(len(REAL))]
    assert torch.equal(arena.gradient(3)[: REAL[3]], gradient(3, 2) + gradient(3, 3))
    assert torch.equal(arena.gradient(4)[: REAL[4]], gradient(4, 2))
    arena.close()


# ---- memory for gradients that holds a budget of bytes: what is spilled comes back, and a step finds it


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
    assert arena.sum_of_squares() == 4 * 4096 and arena.take_failure() is None
    arena.gradient(0)
    assert isinstance(arena.take_failure(), UnsupportedError), "it is gone"


def test_no_room_on_storage(memory: GradientWindows, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store has no room, windows stay in memory, and the failure is kept."""
    monkeypatch.setattr(TensorStore, "add", Mock(side_effect=StorageFullError("There is no room.", "Free some.")))
    for window in range(8):
        fill(memory, window, window)
    assert isinstance(memory.take_failure(), StorageFullError)
    assert all(torch.equal(content(memory, window), torch.arange(4096) + window) for window in range(8))


# ---- the top-K selection in torch operations sends the same bytes as the native core


NATIVE = {
    torch.float32: native.DType.FLOAT32,
    torch.bfloat16: native.DType.BFLOAT16,
    torch.float16: native.DType.FLOAT16,
}


def values_of(numel: int, seed: int) -> torch.Tensor:
    """Return random values with ties, zeros of both signs, subnormals and values beyond the range of 16-bit types."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    special = torch.tensor([0.5, -0.5, 0.0, -0.0, 1e-40, 7e4, -3.4e38, math.inf, -math.inf])
    chosen = torch.rand(numel, generator=generator) < 0.3
    return torch.where(chosen, special[torch.randint(len(special), (numel,), generator=generator)], values)


def native_payload(
    values: torch.Tensor,
    ratio: float,
    dtype: torch.dtype,
    padding: list[tuple[int, int]],
    *,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> bytes:
    """Return the native core's payload for one tasklet with one segment."""
    kept = None if residual is None else residual.numpy()
    compressing = Compressing(values.numpy(), residual=kept, scale=scale, padding=padding)
    return compressing.encode(native.TopK(ratio=ratio, value_dtype=NATIVE[dtype]))


SIZES = [
    (1, 0.5),
    (333, 1e-5),
    (333, 0.9),
    (65_536, 0.01),
    (65_536, 0.9),
    (65_537, 0.5),
    (140_001, 1e-5),
    (140_001, 0.01),
]


@pytest.mark.parametrize(
    ("numel", "ratio", "dtype"),
    # With a ratio of 1 values have the gradient's own type, and zeros are sent, too.
    [*((*size, dtype) for size, dtype in itertools.product(SIZES, NATIVE)), (1_000, 1, torch.float32)],
)
def test_is_the_native_payload(numel: int, ratio: float, dtype: torch.dtype) -> None:
    """The payload equals the native one with ties, zeros, padding and values too large for their type."""
    values = values_of(numel, seed=numel)
    padding = [(numel // 2, numel // 4)] if numel > 3 else []
    taken = torch.ones(numel, dtype=torch.bool)
    for offset, length in padding:
        taken[offset : offset + length] = False
    payload = top_k_payload(values, ratio=ratio, value_dtype=dtype, taken=taken)
    assert payload.numpy().tobytes() == native_payload(values, ratio, dtype, padding)


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_what_was_not_sent_is_added_alike(scale: float) -> None:
    """Adding a scaled residual gives the native core's bits, also for overflow, subnormals and residuals of zero."""
    gradient, residual = values_of(5000, seed=1), values_of(5000, seed=2).clamp(-1e30, 1e30)
    gradient[:4], residual[:4] = torch.tensor([3e38, -3e38, 3e38, 1.0]), torch.tensor([3e38, -3e38, -3e38, -3.4e38])
    payload = top_k_payload(with_residual(gradient, residual, scale), ratio=0.9, value_dtype=torch.float32)
    assert payload.numpy().tobytes() == native_payload(gradient, 0.9, torch.float32, [], residual=residual, scale=scale)
