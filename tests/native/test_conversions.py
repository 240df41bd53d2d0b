"""Conversions of 16-bit types are exact on compute threads, although these flush subnormals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lightning_smartinfinity.native import DType, Operation
from tests.helpers.native_testing import InstructionSet
from tests.native.stored import Run, StoredState

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


def assert_same_floats(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def assert_same_halves(found: npt.NDArray[np.uint16], expected: npt.NDArray[np.uint16], nan: Any) -> None:
    np.testing.assert_array_equal(found[~nan], expected[~nan])


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


def test_every_fp16_value_is_widened_exactly(instruction_set: InstructionSet, tmp_path: Path) -> None:
    """All 65536 fp16 patterns are widened exactly, subnormals, infinities and NaN included."""
    expected = EVERY_16_BIT_VALUE.view(np.float16).astype(np.float32)
    assert_same_floats(widened(tmp_path, EVERY_16_BIT_VALUE, DType.FLOAT16), expected)


def test_every_bf16_value_is_widened_exactly(instruction_set: InstructionSet, tmp_path: Path) -> None:
    """All 65536 bf16 patterns are widened exactly. Subnormals of bf16 stay subnormals of fp32."""
    expected = torch.from_numpy(EVERY_16_BIT_VALUE.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert_same_floats(widened(tmp_path, EVERY_16_BIT_VALUE, DType.BFLOAT16), expected)


def test_fp16_rounds_to_nearest_even(instruction_set: InstructionSet, tmp_path: Path) -> None:
    """fp16 rounds like numpy, and fp16 subnormals are kept. NaN stays NaN."""
    values = float_patterns()
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    found = narrowed(tmp_path, values, DType.FLOAT16)
    nan = np.isnan(values)
    assert_same_halves(found, expected, nan)
    assert np.isnan(found.view(np.float16)[nan]).all()


def test_bf16_rounds_to_nearest_even(instruction_set: InstructionSet, tmp_path: Path) -> None:
    """bf16 rounds like torch, and fp32 subnormals are kept. NaN stays NaN."""
    values = float_patterns()
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    found = narrowed(tmp_path, values, DType.BFLOAT16)
    nan = np.isnan(values)
    assert_same_halves(found, expected, nan)
    assert torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)[torch.from_numpy(nan)].isnan().all()


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_round_trip(instruction_set: InstructionSet, tmp_path: Path, dtype: DType) -> None:
    """A 16-bit parameter that becomes a master and is read back has the same bits, unless it is a NaN."""
    masters = widened(tmp_path, EVERY_16_BIT_VALUE, dtype)
    assert_same_halves(narrowed(tmp_path, masters, dtype), EVERY_16_BIT_VALUE, np.isnan(masters))
