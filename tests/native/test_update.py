from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lightning_smartinfinity.native import DType, Operation, UpdateStep
from tests.helpers.golden import (
    ARRAYS,
    DTYPES,
    STEPS,
    Bits,
    Floats,
    assert_same_bits,
    decode,
    encode,
    expected_state,
    random_arrays,
)
from tests.helpers.native_testing import InstructionSet, select_instruction_set, supported_instruction_sets
from tests.native.stored import Run, StoredState

ONE_OF_EACH = ["adam_half", "adagrad_decayed", "sgd_nesterov", "rmsprop"]


def stored(folder: Path, step: UpdateStep, numel: int) -> StoredState:
    """Return the state of a partition with the arrays of the step's rule."""
    return StoredState(folder, numel, num_arrays=len(ARRAYS[type(step)]))


def update(
    folder: Path,
    step: UpdateStep,
    arrays: tuple[Floats, ...],
    *,
    dtypes: tuple[DType, DType] = (DType.FLOAT32, DType.FLOAT32),
) -> tuple[Bits, ...]:
    """Return the parameter, the master and the rule's other arrays after one step of the pipeline."""
    gradient = encode(arrays[0], dtypes[0])
    parameter = encode(np.full_like(arrays[0], -7), dtypes[1])
    with stored(folder, step, len(gradient)) as state:
        state.write(*arrays[1:])
        run = Run(0, len(gradient), 0, gradient, dtypes[0], parameter, dtypes[1])
        assert state.work(Operation.UPDATE, [run], [step]) is None
        return (parameter, *state.read())


@pytest.mark.parametrize(
    ("name", "gradient_dtype", "dtype"),
    [
        *((name, DType.FLOAT32, DType.FLOAT32) for name in STEPS),
        *((name, *pair) for name in ["adamw", *ONE_OF_EACH] for pair in itertools.product(DTYPES, DTYPES)),
    ],
)
def test_numpy_reference(
    instruction_set: InstructionSet, tmp_path: Path, name: str, gradient_dtype: DType, dtype: DType
) -> None:
    """Every instruction set gives numpy's fp32 bits, with subnormals flushed, and NaN and infinity included.

    A 16-bit gradient is widened exactly. A 16-bit parameter is the master rounded as in torch.
    """
    for special in (False, True):
        arrays = random_arrays(STEPS[name], 20_011, seed=1, special=special)
        parameter, *state = update(tmp_path, STEPS[name], arrays, dtypes=(gradient_dtype, dtype))
        for found, expected in zip(state, expected_state(STEPS[name], arrays, gradient_dtype), strict=True):
            assert_same_bits(found, expected)
        assert_same_bits(decode(parameter, dtype), decode(encode(state[0], dtype), dtype))


@pytest.mark.parametrize("name", ["adam", "adagrad_decayed", "sgd_dampened"])
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 127, 1023, 12287, 12288, 12289])
def test_lengths(tmp_path: Path, numel: int, name: str) -> None:
    """For any length, even shorter than a register, all instruction sets give numpy's bits."""
    arrays = random_arrays(STEPS[name], numel, seed=numel, special=True)
    expected = expected_state(STEPS[name], arrays)
    for choice in supported_instruction_sets():
        select_instruction_set(choice)
        _, *state = update(tmp_path, STEPS[name], arrays)
        for found, wanted in zip(state, expected, strict=True):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["adamw", *ONE_OF_EACH])
def test_unaligned_segments(instruction_set: InstructionSet, tmp_path: Path, dtype: DType, name: str) -> None:
    """Segments may begin at any element and their memory at any item. Nothing beside them is written."""
    numel, shift = 1_000, 3
    arrays = random_arrays(STEPS[name], numel, seed=3, special=False)
    gradient = encode(np.concatenate([np.zeros(shift, np.float32), arrays[0]]), dtype)
    parameter = encode(np.full(numel + 2 * shift, -7, np.float32), dtype)
    untouched = parameter[0]
    runs = [
        Run(first, last - first, 0, gradient[shift + first :], dtype, parameter[shift + first :], dtype)
        for first, last in itertools.pairwise([0, 1, 2, 5, 6, 23, 24, 400, 401, 999, 1000])
    ]
    with stored(tmp_path, STEPS[name], numel) as state:
        state.write(*arrays[1:])
        assert state.work(Operation.UPDATE, runs, [STEPS[name]]) is None
        found = state.read()
    expected = expected_state(STEPS[name], arrays, dtype)
    for array, wanted in zip(found, expected, strict=True):
        assert_same_bits(array, wanted)
    assert_same_bits(parameter[shift:-shift], encode(expected[0], dtype))
    assert (parameter[:shift] == untouched).all() and (parameter[-shift:] == untouched).all()


def test_words_are_the_scalars_in_the_order_of_a_kernel() -> None:
    """``words`` holds a kernel's scalars in its order, as the bits of their fp32."""
    orders = {
        "adamw": "gradient_scale one_minus_beta1 beta2 one_minus_beta2 decay l2 step_size "
        "inverse_sqrt_bias_correction2 eps",
        "adagrad_decayed": "gradient_scale weight_decay step_size eps",
        "sgd_nesterov": "gradient_scale weight_decay buffer_coefficient gradient_coefficient nesterov_momentum lr",
        "rmsprop": "gradient_scale weight_decay alpha one_minus_alpha eps momentum centered lr",
    }
    for name, order in orders.items():
        scalars = np.array([getattr(STEPS[name], field) for field in order.split()], np.float32)
        assert STEPS[name].words == scalars.view(np.uint32).tolist()


# ---- conversions of 16-bit types are exact on compute threads, although these flush subnormals

TORCH = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
EVERY_16_BIT_VALUE = np.arange(1 << 16, dtype=np.uint16)


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
def test_conversions_of_16_bits(instruction_set: InstructionSet, tmp_path: Path, dtype: DType) -> None:
    """All 65536 patterns are widened exactly, and fp32 is rounded like in torch: subnormals are kept, NaN stays NaN."""
    with StoredState(tmp_path, len(EVERY_16_BIT_VALUE), tasklet_numel=20_000, num_arrays=1) as state:
        run = Run(0, len(EVERY_16_BIT_VALUE), parameter=EVERY_16_BIT_VALUE, parameter_dtype=dtype)
        assert state.work(Operation.WRITE, [run]) is None
        (found,) = state.read()
    widened = torch.from_numpy(EVERY_16_BIT_VALUE.view(np.int16)).view(TORCH[dtype]).float().numpy()
    assert_same_bits(found, widened)
    values = float_patterns()
    parameter = np.zeros(len(values), np.int16)
    with StoredState(tmp_path, len(values), tasklet_numel=20_000, num_arrays=1) as state:
        state.write(values)
        run = Run(0, len(values), parameter=parameter, parameter_dtype=dtype)
        assert state.work(Operation.READ, [run]) is None
    rounded, found_16 = torch.from_numpy(values).to(TORCH[dtype]), torch.from_numpy(parameter).view(TORCH[dtype])
    nan = rounded.isnan()
    assert torch.equal(found_16.isnan(), nan)
    assert torch.equal(found_16[~nan].view(torch.int16), rounded[~nan].view(torch.int16))
