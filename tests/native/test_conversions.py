"""Conversions of 16-bit types are exact on compute threads, although these flush subnormals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lightning_smartinfinity.native import DType, Operation
from tests.helpers.golden import assert_same_bits
from tests.helpers.native_testing import InstructionSet
from tests.native.stored import Run, StoredState

TORCH = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
EVERY_16_BIT_VALUE = np.arange(1 << 16, dtype=np.uint16)


def widened(folder: Path, values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float32]:
    """Return masters initialized from 16-bit parameters."""
    with StoredState(folder, len(values), tasklet_numel=20_000, num_arrays=1) as state:
        run = Run(0, len(values), parameter=values, parameter_dtype=dtype)
        assert state.work(Operation.WRITE, [run]) is None
        return state.read()[0]


def narrowed(folder: Path, values: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.uint16]:
    """Return 16-bit parameters read from fp32 masters."""
    parameter = np.zeros(len(values), np.uint16)
    with StoredState(folder, len(values), tasklet_numel=20_000, num_arrays=1) as state:
        state.write(values)
        run = Run(0, len(values), parameter=parameter, parameter_dtype=dtype)
        assert state.work(Operation.READ, [run]) is None
    return parameter


def float_patterns() -> npt.NDArray[np.float32]:
    """Return random bit patterns, and every boundary of 16-bit rounding with its neighbours."""
    random = np.random.default_rng(0)
    patterns = [random.integers(0, 1 << 32, 300_000, dtype=np.uint32)]
    # Values around all fp16 and bf16 values and around the halves between them.
    with np.errstate(all="ignore"):
        half = EVERY_16_BIT_VALUE.view(np.float16).astype(np.float32).view(np.uint32)
    for delta in (-1, 0, 1, (1 << 12) - 1, 1 << 12, (1 << 12) + 1):
        patterns.append(half + np.uint32(delta & 0xFFFFFFFF))
    for delta in (0x7FFF, 0x8000, 0x8001):
        patterns.append((EVERY_16_BIT_VALUE.astype(np.uint32) << np.uint32(16)) + np.uint32(delta))
    return np.concatenate(patterns).view(np.float32)


@pytest.mark.parametrize("dtype", TORCH)
def test_every_value_is_widened_exactly(instruction_set: InstructionSet, tmp_path: Path, dtype: DType) -> None:
    """All 65536 patterns are widened exactly, subnormals, infinities and NaN included."""
    expected = torch.from_numpy(EVERY_16_BIT_VALUE.view(np.int16)).view(TORCH[dtype]).float().numpy()
    assert_same_bits(widened(tmp_path, EVERY_16_BIT_VALUE, dtype), expected)


@pytest.mark.parametrize("dtype", TORCH)
def test_values_are_rounded_to_nearest_even(instruction_set: InstructionSet, tmp_path: Path, dtype: DType) -> None:
    """A 16-bit type rounds like torch, and subnormals are kept. NaN stays NaN."""
    values = float_patterns()
    expected = torch.from_numpy(values).to(TORCH[dtype])
    found = torch.from_numpy(narrowed(tmp_path, values, dtype).view(np.int16)).view(TORCH[dtype])
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int16), expected[~nan].view(torch.int16))
