"""The gradient arena gives the results of plain accumulation in torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from tests.pipeline.harness import Case, layout_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUT = layout_of(Case())
REAL = [shape[0] - shape[1] for shape in Case().shapes]


def gradient(parameter: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + parameter)
    return torch.randn(REAL[parameter], generator=generator).to(dtype)


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99)), max_size=12),
    arena_dtype=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
)
def test_first_writes_later_add(arrivals: list[tuple[int, int]], arena_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """A window sums its gradients in the arena's dtype, whatever a previous window left in memory."""
    arena = GradientArena(LAYOUT, dtype=arena_dtype)
    arena.buffer.fill_(math.nan)
    expected: dict[int, torch.Tensor] = {}
    for parameter, seed in arrivals:
        value = gradient(parameter, seed, dtype)
        arena.arrive(parameter, value)
        if parameter in expected:
            expected[parameter].add_(value)
        else:
            expected[parameter] = value.to(arena_dtype)
    assert arena.active.tolist() == [index in expected for index in range(len(REAL))]
    for parameter, value in expected.items():
        stored = arena.gradient(parameter)
        assert torch.equal(stored[: REAL[parameter]], value)
        assert not stored[REAL[parameter] :].any()
    squares = sum(value.double().square().sum().item() for value in expected.values())
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
    for parameter in range(len(REAL)):
        stored, value = arena.gradient(parameter), gradient(parameter, 0)
        if parameter not in arrived:
            assert (stored == 7.0).all()
            continue
        expected = value * 0.3 if change == "scale" else value.clamp(-0.5, 0.5)
        assert torch.equal(stored[: REAL[parameter]], expected)
        assert not stored[REAL[parameter] :].any()
    squares = sum(arena.gradient(parameter).double().square().sum().item() for parameter in arrived)
    assert arena.sum_of_squares() == pytest.approx(squares, rel=1e-12)
    arena.close()


def test_surplus_is_padding_and_what_is_missing_is_zero() -> None:
    """A slice's padding is cut off. A slice that is too short is filled with zeros, and may be longer later."""
    arena = GradientArena(LAYOUT)
    padded = torch.full((6_000,), math.inf)
    padded[:5_997] = 1.0
    arena.arrive(3, padded)
    assert arena.sum_of_squares() == 5_997.0
    assert arena.gradient(3)[5_997:].tolist() == [0.0] * 3
    arena.reset()
    arena.arrive(3, torch.ones(10))
    arena.arrive(3, torch.ones(5_997))
    assert arena.gradient(3).sum() == 5_997 + 10


def test_arrivals_of_any_shape_are_read_flat() -> None:
    """Strided and multidimensional gradients arrive in the order of their elements, without autograd."""
    arena = GradientArena(LAYOUT)
    values = torch.arange(24_000.0, requires_grad=True)[::2].view(120, 100)
    arena.arrive(1, values)
    assert torch.equal(arena.gradient(1), torch.arange(0.0, 24_000.0, 2.0))


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


def test_an_empty_arrival_makes_a_parameter_active() -> None:
    """An empty gradient makes a parameter active, as on a rank that holds padding only.

    It does not change the gradients before and after it.
    """
    arena = GradientArena(LAYOUT)
    arena.buffer.fill_(7.0)
    arena.arrive(5, torch.empty(0))
    arena.arrive(2, torch.empty(0))
    arena.arrive(2, torch.ones(7))
    arena.arrive(2, torch.empty(0))
    assert arena.active.tolist() == [False, False, True, False, False, True, False]
    assert not arena.gradient(5).any()
    assert arena.gradient(2).tolist() == [1.0] * 7
    assert arena.sum_of_squares() == 7.0


@given(
    windows=st.lists(st.lists(st.integers(0, 6), unique=True, max_size=7), max_size=4),
    lengths=st.lists(st.sampled_from(["exact", "padded", "empty"]), min_size=7, max_size=7),
    arena_dtype=st.sampled_from(DTYPES),
    dtypes=st.lists(st.sampled_from([*DTYPES, torch.float64]), min_size=7, max_size=7),
)
def test_arriving_together_is_arriving_one_by_one(
    windows: list[list[int]], lengths: list[str], arena_dtype: torch.dtype, dtypes: list[torch.dtype]
) -> None:
    """Parameters that arrive together give the same bits as one by one, also for short and padded gradients."""
    together, alone = (GradientArena(LAYOUT, dtype=arena_dtype) for _ in range(2))
    for arena in (together, alone):
        arena.buffer.fill_(math.nan)
    for seed, parameters in enumerate(windows):
        arriving = []
        for parameter in parameters:
            value = gradient(parameter, seed, dtypes[parameter])
            shown = {"exact": value, "padded": torch.cat([value, value.new_ones(2)]), "empty": value[:0]}
            arriving.append(shown[lengths[parameter]])
        together.arrive_all(parameters, arriving)
        for parameter, value in zip(parameters, arriving, strict=True):
            alone.arrive(parameter, value)
    assert together.active.tolist() == alone.active.tolist()
    assert together.sum_of_squares() == alone.sum_of_squares()
    for parameter in alone.active.nonzero()[0].tolist():
        assert torch.equal(together.gradient(parameter), alone.gradient(parameter))


@pytest.mark.parametrize(
    "hard",
    [
        lambda value: value.view(100, 120).t(),
        lambda value: torch.stack([value, -value], 1)[:, 0],
        lambda value: value[:1].expand(12_000),
        lambda value: torch.view_as_complex(torch.stack([value, -value], 1)).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "negated"],
)
def test_gradients_that_do_not_lie_in_order_arrive_by_value(hard: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gradients whose memory is in another order, or negated, arrive with the values that torch shows."""
    arena = GradientArena(LAYOUT)
    value = hard(gradient(1, 0))
    for times in (1, 2):
        arena.arrive_all([1], [value])
        assert torch.equal(arena.gradient(1), times * value.reshape(-1))
    arena.close()


def test_a_negated_view_of_one_element_arrives_by_value() -> None:
    """A negated view is contiguous, but its memory holds the opposite value."""
    arena = GradientArena(layout_of(Case(shapes=((1, 0, 0, 0),))))
    negated = torch.complex(torch.zeros(1), torch.ones(1)).conj().imag
    arena.arrive_all([0], [negated])
    assert arena.gradient(0).tolist() == [-1.0]
    arena.close()


def test_reset_ends_the_window_without_touching_memory() -> None:
    """After reset() no parameter is active and memory is unchanged. The next gradient overwrites it."""
    arena = GradientArena(LAYOUT)
    arena.arrive(1, gradient(1, 1))
    before = arena.buffer.clone()
    arena.reset()
    assert not arena.active.any()
    assert torch.equal(arena.buffer, before)
    assert arena.sum_of_squares() == 0.0
    arena.arrive(1, gradient(1, 2))
    assert torch.equal(arena.gradient(1), gradient(1, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_gradients_show_in_the_norm(value: float) -> None:
    """One non-finite element makes the sum of squares non-finite while its parameter is active."""
    arena = GradientArena(LAYOUT)
    bad = gradient(6, 0)
    bad[8_000] = value
    arena.arrive(6, bad)
    assert not math.isfinite(arena.sum_of_squares())
    arena.reset()
    arena.arrive(1, gradient(1, 0))
    assert math.isfinite(arena.sum_of_squares())


def test_large_finite_gradients_stay_finite() -> None:
    """The sum of squares is taken in double, so large gradients do not look like an overflow of the loss scale."""
    arena = GradientArena(LAYOUT)
    arena.arrive(1, torch.full((12_000,), 3e38))
    assert arena.sum_of_squares() == pytest.approx(12_000 * 9e76)


def test_views_and_addresses_of_sub_groups() -> None:
    """flats() and view() refer to the same memory of each sub-group."""
    arena = GradientArena(LAYOUT, dtype=torch.bfloat16)
    for group, flat in zip(LAYOUT.sub_groups, arena.flats(), strict=True):
        view = arena.view(group.index)
        assert (flat.address, flat.numel) == (view.data_ptr(), group.numel)
    assert arena.view(0).data_ptr() % (2 << 20) == 0 or arena.buffer.nbytes < 2 << 20


def test_memory_outlives_the_arena() -> None:
    """A tensor over the arena's memory keeps that memory mapped."""
    arena = GradientArena(LAYOUT)
    view = arena.view(1)
    arena.close()
    del arena
    view.fill_(1.0)
    assert view.sum() == view.numel()
