from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lightning_smartinfinity.native import DType, sum_of_squares
from tests.helpers.native_testing import InstructionSet, select_instruction_set, supported_instruction_sets

TORCH = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}


def encoded(values: npt.NDArray[np.float32], dtype: DType) -> torch.Tensor:
    return torch.from_numpy(values).to(TORCH[dtype])


def squares(values: torch.Tensor, dtype: DType) -> float:
    return sum_of_squares(values.data_ptr(), values.numel(), dtype)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 1000, 100_003])
def test_bits_do_not_depend_on_the_instruction_set(dtype: DType, numel: int) -> None:
    """All instruction sets give the same bits, within rounding of the exact sum."""
    values = encoded(np.random.default_rng(numel).standard_normal(numel).astype(np.float32), dtype)
    sums = set()
    for choice in supported_instruction_sets():
        select_instruction_set(choice)
        sums.add(squares(values, dtype))
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(math.fsum(x * x for x in values.tolist()), rel=1e-14)


@pytest.mark.parametrize("dtype", TORCH)
def test_large_values_do_not_overflow(instruction_set: InstructionSet, dtype: DType) -> None:
    """The sum of the largest finite values of a type is finite."""
    largest = torch.full((100_000,), torch.finfo(TORCH[dtype]).max, dtype=TORCH[dtype])
    assert squares(largest, dtype) == pytest.approx(1e5 * torch.finfo(TORCH[dtype]).max ** 2)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("index", [0, 17, 511, 512, 530])
def test_one_element_that_is_not_finite(
    instruction_set: InstructionSet, dtype: DType, poison: float, index: int
) -> None:
    """One non-finite element anywhere makes the sum non-finite."""
    values: Any = encoded(np.ones(531, np.float32), dtype)
    assert squares(values, dtype) == 531
    values[index] = poison
    assert not math.isfinite(squares(values, dtype))


def test_subnormals_count(instruction_set: InstructionSet) -> None:
    """Subnormals are squared in double, where they are normal numbers."""
    tiny = encoded(np.full(4, 1e-40, np.float32), DType.FLOAT32)
    assert squares(tiny, DType.FLOAT32) == 4 * float(tiny[0]) ** 2 > 0
