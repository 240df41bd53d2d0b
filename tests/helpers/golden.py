"""Golden vectors of every update rule: the steps, the values they are applied to, and the comparison of bits.

The host's kernels, those of a card and numpy must agree on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_smartinfinity.common import update_rules
from lightning_smartinfinity.native import DType
from tests.helpers.update_rules import ARRAYS, RULES, Floats, adagrad_step, adam_step, rmsprop_step, sgd_step

__all__ = [
    "DTYPES",
    "STEPS",
    "STEPS_OF_RULES",
    "Bits",
    "assert_same_bits",
    "decode",
    "encode",
    "expected_state",
    "random_arrays",
]

Bits = npt.NDArray[Any]
"""Values as they lie in memory: fp32, or 16-bit patterns as int16."""

DTYPES = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]
_TORCH = {DType.FLOAT32: torch.float32, DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}

STEPS = {
    "adamw": adam_step(),
    "adam": adam_step(decay=1.0, l2=0.01),
    "adam_near_end": adam_step(one_minus_beta1=0.8, gradient_scale=-0.5),
    "adam_half": adam_step(one_minus_beta1=0.5, l2=0.1, decay=1.0),
    "adagrad_without_eps": adagrad_step(eps=0.0),
    "adagrad": adagrad_step(),
    "adagrad_decayed": adagrad_step(weight_decay=0.1, step_size=1e-2 / 1.9, gradient_scale=-0.5),
    "sgd_nesterov": sgd_step(nesterov_momentum=0.9),
    "sgd": sgd_step(),
    "sgd_first": sgd_step(buffer_coefficient=0.0, gradient_scale=-0.5),
    "sgd_dampened": sgd_step(gradient_coefficient=0.3, weight_decay=0.1),
    "sgd_nesterov_first": sgd_step(nesterov_momentum=0.9, buffer_coefficient=0.0, weight_decay=0.01),
    "rmsprop": rmsprop_step(weight_decay=0.1, gradient_scale=-0.5),
    "rmsprop_plain": rmsprop_step(momentum=0.0, centered=0.0),
    "rmsprop_with_momentum": rmsprop_step(centered=0.0, weight_decay=0.01),
    "rmsprop_centered_near_end": rmsprop_step(momentum=0.0, alpha=0.2, one_minus_alpha=0.8),
}
STEPS_OF_RULES: dict[str, list[Any]] = {
    rule.name: [step for step in STEPS.values() if type(step).__name__ == rule.step] for rule in update_rules.RULES
}
"""The steps of each rule. Tests that need one step of a rule take the first."""

_SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.1754942e-38, 1.1754944e-38, 3e38, -3e38, 1e-30, 65504, 65520],
    np.float32,
)
_SQUARES = ("exp_avg_sq", "sum", "square_avg")  # never negative


def random_arrays(step: object, numel: int, seed: int, *, special: bool) -> tuple[Floats, ...]:
    """Return a gradient, then the arrays of the step's rule.

    Args:
        step: Its class decides the rule.
        numel: Number of elements of each array.
        seed: Seed of the values.
        special: Whether a third of them are zeros, infinities, NaNs, subnormals and their neighbours.
    """
    random = np.random.default_rng(seed)
    arrays = []
    for name in ("gradient", *ARRAYS[type(step)]):
        values = random.standard_normal(numel).astype(np.float32)
        if name in _SQUARES:
            values = values * values
        if name == "grad_avg":  # otherwise the variance would be negative
            values = np.tanh(values) * np.float32(0.9) * np.sqrt(arrays[2])
        if special:
            chosen = random.integers(0, 3, numel) == 0
            values[chosen] = random.choice(_SPECIAL, int(chosen.sum()))
        arrays.append(np.abs(values) if name in _SQUARES else values)
    return tuple(arrays)


def expected_state(step: object, arrays: tuple[Floats, ...], dtype: DType = DType.FLOAT32) -> tuple[Floats, ...]:
    """Return the rule's arrays after the step, computed by numpy, for a gradient of this type."""
    gradient, *state = arrays
    return RULES[type(step)](step, decode(encode(gradient, dtype), dtype), tuple(state))


def encode(values: Floats, dtype: DType) -> Bits:
    """Return values as stored in memory: fp32, or the 16-bit patterns that torch gives."""
    if dtype is DType.FLOAT32:
        return values.copy()
    return torch.from_numpy(values).to(_TORCH[dtype]).view(torch.int16).numpy().copy()


def decode(values: Bits, dtype: DType) -> Floats:
    """Return stored values as fp32."""
    if dtype is DType.FLOAT32:
        return values.copy()
    return torch.from_numpy(values).view(_TORCH[dtype]).float().numpy()


def assert_same_bits(found: Bits, expected: Bits) -> None:
    """Assert that two arrays are equal bit for bit; in fp32 any NaN equals any other."""
    assert found.dtype == expected.dtype
    if found.dtype == np.float32:
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), nan)
        found, expected = found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan]
    np.testing.assert_array_equal(found, expected)
