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


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exact": lambda value: value,
    "padded": lambda value: torch.cat([value, value.new_full((2,), math.inf)]),
    "short": lambda value: value[: len(value) // 2],
    "empty": lambda value: value[:0],
    "strided": lambda value: torch.stack([value, -value], 1).requires_grad_()[:, 0],
    "expanded": lambda value: value[:1].expand(len(value)),
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
            assert torch.equal(stored[: REAL[parameter]], total)
            assert not stored[REAL[parameter] :].any()
        squares = sum(total.double().square().sum().item() for total in expected.values())
        assert arena.sum_of_squares() == pytest.approx(squares, rel=1e-12)
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 2_000])
def test_a_negated_gradient_arrives_by_value(numel: int, dtype: torch.dtype) -> None:
    """What torch shows is added, and not what is in memory."""
    arena = GradientArena(layout_of(Case(shapes=((numel, 0, 0, 0),))))
    value = torch.arange(1.0, numel + 1).to(dtype)
    for times in (1, 2):
        arena.arrive_all([0], [torch._neg_view(-value)])
        assert torch.equal(arena.gradient(0), times * value.float())
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
