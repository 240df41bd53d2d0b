"""Sums of gradients and of their squares: the bits of torch, and the same bits by every instruction set."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from lightning_smartinfinity.native import DType, accumulate, sum_of_squares
from tests.helpers.native_testing import InstructionSet, select_instruction_set, supported_instruction_sets

TORCH = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
# Lengths around the width of the registers and around the number of elements squared at a time.
NUMELS = [0, 1, 31, 32, 33, 1023, 1024, 1025, 5_000]
# Values whose sums overflow or become subnormal, subnormals and signed zeros.
EDGES = [0.0, -0.0, 1e-40, -3e-39, 6e-8, 6e-5, 65_504.0, 65_520.0, 3.3e38, -3.3e38]


def values(numel: int, dtype: DType, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(numel, generator=generator)
    edges = torch.tensor(EDGES)[torch.randint(len(EDGES), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.2, edges, drawn).to(TORCH[dtype])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether the bits are equal. All NaNs count as equal."""
    whole = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return bool(((left.view(whole) == right.view(whole)) | (left.isnan() & right.isnan())).all())


def squares(values: torch.Tensor, dtype: DType) -> float:
    return sum_of_squares(values.data_ptr(), values.numel(), dtype)


@pytest.mark.parametrize(("gradient_dtype", "dtype"), list(itertools.product(TORCH, TORCH)))
def test_sums_are_torchs(instruction_set: InstructionSet, gradient_dtype: DType, dtype: DType) -> None:
    """Writing or adding many gradients in one call gives torch's bits, and the squares of a separate pass."""
    gradients = [values(numel, gradient_dtype, numel) for numel in NUMELS * 2]
    sums = [values(numel, dtype, numel + 1) for numel in NUMELS * 2]
    adds = [False] * len(NUMELS) + [True] * len(NUMELS)
    expected = [sum_.clone() for sum_ in sums]
    for gradient, target, add in zip(gradients, expected, adds, strict=True):
        target.add_(gradient) if add else target.copy_(gradient)
    found = accumulate(
        [gradient.data_ptr() for gradient in gradients],
        [sum_.data_ptr() for sum_ in sums],
        [gradient.numel() for gradient in gradients],
        adds,
        gradient_dtype,
        dtype,
    )
    for sum_, target, square in zip(sums, expected, found, strict=True):
        assert same_bits(sum_, target)
        assert repr(square) == repr(squares(target, dtype))


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("scale", ["one", "largest", "smallest"])
def test_squares_do_not_depend_on_the_instruction_set(dtype: DType, scale: str) -> None:
    """The sum is within rounding of the exact one: the largest values do not overflow, and subnormals count."""
    info = torch.finfo(TORCH[dtype])
    factor = {"one": 1.0, "largest": info.max, "smallest": info.smallest_normal / 8}[scale]
    for numel in (0, 1, 31, 32, 33, 1000, 100_003):
        drawn = np.random.default_rng(numel).uniform(-1, 1, numel) * factor
        content, sums = torch.from_numpy(drawn).to(TORCH[dtype]), set()
        for choice in supported_instruction_sets():
            select_instruction_set(choice)
            sums.add(squares(content, dtype))
        assert len(sums) == 1
        assert sums.pop() == pytest.approx(math.fsum(x * x for x in content.tolist()), rel=1e-14, abs=0)


@pytest.mark.parametrize("dtype", TORCH)
def test_one_element_that_is_not_finite(instruction_set: InstructionSet, dtype: DType) -> None:
    """One non-finite element anywhere makes the sum of squares non-finite."""
    for poison, index in itertools.product((math.inf, -math.inf, math.nan), (0, 17, 511, 512, 530)):
        content = torch.ones(531, dtype=TORCH[dtype])
        content[index] = poison
        assert not math.isfinite(squares(content, dtype))


@pytest.mark.parametrize("lengths", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)])
def test_lists_of_different_lengths_are_refused(lengths: tuple[int, int, int, int]) -> None:
    """Lists of different lengths are refused."""
    lists = ([value] * length for value, length in zip((0, 0, 1, False), lengths, strict=True))
    with pytest.raises(ValueError, match="as many"):
        accumulate(*lists, DType.FLOAT32, DType.FLOAT32)
