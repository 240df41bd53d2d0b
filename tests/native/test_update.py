from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lightning_smartinfinity.native import (
    AdamStep,
    DType,
    InstructionSet,
    Operation,
    select_instruction_set,
    supported_instruction_sets,
)
from tests.native.formula import Floats, adam, adam_step
from tests.native.stored import Run, StoredState

DTYPES = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]
TORCH = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
STEPS = {
    "adamw": adam_step(),
    "adam": adam_step(decay=1.0, l2=0.01),
    "near_end": adam_step(beta1=0.2, one_minus_beta1=0.8, gradient_scale=-0.5),
    "half": adam_step(beta1=0.5, one_minus_beta1=0.5, l2=0.1, decay=1.0),
}
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.1754942e-38, 1.1754944e-38, 3e38, -3e38, 1e-30, 65504, 65520],
    np.float32,
)

Bits = npt.NDArray[Any]


def encode(values: Floats, dtype: DType) -> Bits:
    """As stored in memory: fp32, or the 16-bit patterns that torch gives."""
    if dtype is DType.FLOAT32:
        return values.copy()
    return torch.from_numpy(values).to(TORCH[dtype]).view(torch.int16).numpy().copy()


def decode(values: Bits, dtype: DType) -> Floats:
    if dtype is DType.FLOAT32:
        return values.copy()
    return torch.from_numpy(values).view(TORCH[dtype]).float().numpy()


def assert_same_bits(found: Bits, expected: Bits) -> None:
    """Bit for bit; a NaN is a NaN."""
    assert found.dtype == expected.dtype
    if found.dtype == np.float32:
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), nan)
        found, expected = found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan]
    np.testing.assert_array_equal(found, expected)


def random_state(numel: int, seed: int, *, special: bool) -> tuple[Floats, Floats, Floats, Floats]:
    """Gradient, master, exp_avg and exp_avg_sq."""
    random = np.random.default_rng(seed)
    g, p, m, v = (random.standard_normal(numel).astype(np.float32) for _ in range(4))
    v = v * v
    if special:
        for array in (g, p, m):
            chosen = random.integers(0, 3, numel) == 0
            array[chosen] = random.choice(SPECIAL, int(chosen.sum()))
        chosen = random.integers(0, 3, numel) == 0
        v[chosen] = np.abs(random.choice(SPECIAL, int(chosen.sum())))
    return g, p, m, v


def update(
    folder: Path,
    step: AdamStep,
    arrays: tuple[Floats, Floats, Floats, Floats],
    *,
    dtypes: tuple[DType, DType] = (DType.FLOAT32, DType.FLOAT32),
) -> tuple[Bits, ...]:
    """Parameter, master, exp_avg and exp_avg_sq after one step by the pipeline."""
    gradient = encode(arrays[0], dtypes[0])
    parameter = encode(np.full_like(arrays[0], -7), dtypes[1])
    with StoredState(folder, len(gradient)) as state:
        state.write(*arrays[1:])
        run = Run(0, len(gradient), 0, gradient, dtypes[0], parameter, dtypes[1])
        assert state.work(Operation.UPDATE, [run], [step]) is None
        return (parameter, *state.read())


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
def test_numpy_reference(instruction_set: InstructionSet, tmp_path: Path, name: str, special: bool) -> None:
    """Every instruction set gives numpy's fp32 results bit for bit, subnormals flushed, NaN and infinity included."""
    arrays = random_state(20_011, seed=1, special=special)
    parameter, *state = update(tmp_path, STEPS[name], arrays)
    for found, expected in zip(state, adam(STEPS[name], arrays[0], arrays[1:]), strict=True):
        assert_same_bits(found, expected)
    assert_same_bits(parameter, state[0])


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(DTYPES, DTYPES)), ids=lambda pair: "-".join(d.name for d in pair)
)
@pytest.mark.parametrize("name", ["adamw", "half"])
def test_dtypes(instruction_set: InstructionSet, tmp_path: Path, dtypes: tuple[DType, DType], name: str) -> None:
    """A 16-bit gradient is widened exactly; a 16-bit parameter is the master rounded as torch rounds it."""
    arrays = random_state(5_003, seed=2, special=True)
    parameter, *state = update(tmp_path, STEPS[name], arrays, dtypes=dtypes)
    gradient = decode(encode(arrays[0], dtypes[0]), dtypes[0])
    for found, expected in zip(state, adam(STEPS[name], gradient, arrays[1:]), strict=True):
        assert_same_bits(found, expected)
    assert_same_bits(decode(parameter, dtypes[1]), decode(encode(state[0], dtypes[1]), dtypes[1]))


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 127, 1023, 12287, 12288, 12289])
def test_lengths(tmp_path: Path, numel: int) -> None:
    """No length, odd or shorter than a register, changes a bit between instruction sets, nor between them and numpy."""
    arrays = random_state(numel, seed=numel, special=True)
    expected = adam(STEPS["adam"], arrays[0], arrays[1:])
    for choice in supported_instruction_sets():
        select_instruction_set(choice)
        _, *state = update(tmp_path, STEPS["adam"], arrays)
        for found, wanted in zip(state, expected, strict=True):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_segments(instruction_set: InstructionSet, tmp_path: Path, dtype: DType) -> None:
    """Segments may begin at any element and memory at any multiple of its item; nothing beside them is written."""
    numel, shift = 1_000, 3
    g, p, m, v = random_state(numel, seed=3, special=False)
    gradient = encode(np.concatenate([np.zeros(shift, np.float32), g]), dtype)
    parameter = encode(np.full(numel + 2 * shift, -7, np.float32), dtype)
    untouched = parameter[0]
    runs = [
        Run(first, last - first, 0, gradient[shift + first :], dtype, parameter[shift + first :], dtype)
        for first, last in itertools.pairwise([0, 1, 2, 5, 6, 23, 24, 400, 401, 999, 1000])
    ]
    with StoredState(tmp_path, numel) as state:
        state.write(p, m, v)
        assert state.work(Operation.UPDATE, runs, [STEPS["adamw"]]) is None
        found = state.read()
    expected = adam(STEPS["adamw"], decode(encode(g, dtype), dtype), (p, m, v))
    for array, wanted in zip(found, expected, strict=True):
        assert_same_bits(array, wanted)
    assert_same_bits(parameter[shift:-shift], encode(expected[0], dtype))
    assert (parameter[:shift] == untouched).all() and (parameter[-shift:] == untouched).all()


def test_parameter_is_optional(tmp_path: Path) -> None:
    """A segment without a parameter address updates the state alone."""
    g, p, m, v = random_state(100, seed=4, special=False)
    with StoredState(tmp_path, 100) as state:
        state.write(p, m, v)
        assert state.work(Operation.UPDATE, [Run(0, 100, 0, g)], [STEPS["adamw"]]) is None
        assert_same_bits(state.read()[0], adam(STEPS["adamw"], g, (p, m, v))[0])


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_torch_optimizers(instruction_set: InstructionSet, tmp_path: Path, decoupled: bool) -> None:
    """Fifty steps stay within rounding of torch.optim."""
    lr, betas, eps, weight_decay, numel = 1e-2, (0.9, 0.99), 1e-8, 0.1, 3_001
    random = np.random.default_rng(5)
    start = random.standard_normal(numel).astype(np.float32)
    expected = torch.nn.Parameter(torch.from_numpy(start.copy()))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([expected], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)
    parameter = start.copy()
    with StoredState(tmp_path, numel, tasklet_numel=1024) as state:
        state.write(start)
        for number in range(1, 51):
            gradient = random.standard_normal(numel).astype(np.float32)
            expected.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
            step = adam_step(
                beta1=betas[0],
                one_minus_beta1=1 - betas[0],
                beta2=betas[1],
                one_minus_beta2=1 - betas[1],
                decay=1 - lr * weight_decay if decoupled else 1.0,
                l2=0.0 if decoupled else weight_decay,
                step_size=lr / (1 - betas[0] ** number),
                inverse_sqrt_bias_correction2=(1 - betas[1] ** number) ** -0.5,
                eps=eps,
            )
            run = Run(0, numel, 0, gradient, parameter=parameter)
            assert state.work(Operation.UPDATE, [run], [step]) is None
    np.testing.assert_allclose(parameter, expected.detach().numpy(), rtol=2e-5, atol=2e-6)
