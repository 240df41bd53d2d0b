from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from lightning_smartinfinity.native import DType, Operation, UpdateStep
from tests.helpers.golden import (
    DTYPES,
    STEPS,
    Bits,
    assert_same_bits,
    decode,
    encode,
    expected_state,
    random_arrays,
)
from tests.helpers.native_testing import InstructionSet, select_instruction_set, supported_instruction_sets
from tests.helpers.update_rules import ARRAYS, Floats
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


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
def test_numpy_reference(instruction_set: InstructionSet, tmp_path: Path, name: str, special: bool) -> None:
    """Every instruction set gives numpy's fp32 bits, with subnormals flushed, and NaN and infinity included."""
    arrays = random_arrays(STEPS[name], 20_011, seed=1, special=special)
    parameter, *state = update(tmp_path, STEPS[name], arrays)
    for found, expected in zip(state, expected_state(STEPS[name], arrays), strict=True):
        assert_same_bits(found, expected)
    assert_same_bits(parameter, state[0])


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(DTYPES, DTYPES)), ids=lambda pair: "-".join(d.name for d in pair)
)
@pytest.mark.parametrize("name", ["adamw", *ONE_OF_EACH])
def test_dtypes(instruction_set: InstructionSet, tmp_path: Path, dtypes: tuple[DType, DType], name: str) -> None:
    """A 16-bit gradient is widened exactly. A 16-bit parameter is the master rounded as in torch."""
    arrays = random_arrays(STEPS[name], 5_003, seed=2, special=True)
    parameter, *state = update(tmp_path, STEPS[name], arrays, dtypes=dtypes)
    for found, expected in zip(state, expected_state(STEPS[name], arrays, dtypes[0]), strict=True):
        assert_same_bits(found, expected)
    assert_same_bits(decode(parameter, dtypes[1]), decode(encode(state[0], dtypes[1]), dtypes[1]))


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


@pytest.mark.parametrize("name", ["sgd_first", "sgd_nesterov_first"])
def test_a_buffer_that_begins_forgets_what_it_held(instruction_set: InstructionSet, tmp_path: Path, name: str) -> None:
    """The first step of a momentum buffer ignores its old contents, even infinities and NaNs."""
    gradient, master = random_arrays(STEPS[name], 100, seed=5, special=False)[:2]
    anything = np.resize(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), 100)
    for found, expected in zip(
        update(tmp_path, STEPS[name], (gradient, master, anything))[1:],
        expected_state(STEPS[name], (gradient, master, np.zeros(100, np.float32))),
        strict=True,
    ):
        assert_same_bits(found, expected)


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
