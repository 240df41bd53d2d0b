"""Every update rule in numpy, and golden vectors: steps, the values they are applied to, and the comparison of bits.

The host's kernels, those of a card and numpy must agree on them. The arithmetic is that of a compute thread and of an
accelerator's floating-point operators: one fp32 operation at a time, subnormals flushed before and after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES as DESCRIPTIONS
from lightning_smartinfinity.native import AdagradStep, AdamStep, DType, RmspropStep, SgdStep

Floats = npt.NDArray[np.float32]

ARRAYS = {getattr(native, rule.step): rule.arrays for rule in DESCRIPTIONS}
"""The arrays that each rule keeps."""


def adam_step(*, seed: int = 0, **changes: float) -> AdamStep:
    """Return the tenth step of AdamW with torch's defaults and these changes."""
    step = 10
    values = {
        "gradient_scale": 1.0,
        "one_minus_beta1": 1 - 0.9,
        "beta2": 0.999,
        "one_minus_beta2": 1 - 0.999,
        "decay": 1 - 1e-3 * 1e-2,
        "l2": 0.0,
        "step_size": 1e-3 / (1 - 0.9**step),
        "inverse_sqrt_bias_correction2": (1 - 0.999**step) ** -0.5,
        "eps": 1e-8,
    }
    return AdamStep(**{**values, **changes}, seed=seed)


def adagrad_step(**changes: float) -> AdagradStep:
    """Return a step of Adagrad with torch's defaults and these changes."""
    values = {"gradient_scale": 1.0, "weight_decay": 0.0, "step_size": 1e-2, "eps": 1e-10}
    return AdagradStep(**{**values, **changes})


def sgd_step(**changes: float) -> SgdStep:
    """Return a step of SGD with momentum 0.9 after the first one, with these changes."""
    values = {
        "gradient_scale": 1.0,
        "weight_decay": 0.0,
        "buffer_coefficient": 0.9,
        "gradient_coefficient": 1.0,
        "nesterov_momentum": 0.0,
        "lr": 1e-2,
    }
    return SgdStep(**{**values, **changes})


def rmsprop_step(**changes: float) -> RmspropStep:
    """Return a centered step of RMSprop with momentum, torch's other defaults and these changes."""
    values = {
        "gradient_scale": 1.0,
        "weight_decay": 0.0,
        "alpha": 0.99,
        "one_minus_alpha": 1 - 0.99,
        "eps": 1e-8,
        "momentum": 0.9,
        "centered": 1.0,
        "lr": 1e-2,
    }
    return RmspropStep(**{**values, **changes})


def flush(values: Floats) -> Floats:
    """Return the values with subnormals replaced by zeros of their sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values).astype(np.float32)


def adam(step: AdamStep, gradient: Floats, state: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """Return master, exp_avg and exp_avg_sq after one step of Adam or AdamW.

    Args:
        step: The scalars.
        gradient: fp32, unscaled.
        state: fp32 master, exp_avg and exp_avg_sq; not changed.
    """
    with np.errstate(all="ignore"):
        p, m, v = (flush(array) for array in state)
        g = _decayed(gradient, p, step.gradient_scale, step.l2)
        m = _lerp(m, g, _scalar(step.one_minus_beta1))
        square = flush(flush(_scalar(step.one_minus_beta2) * g) * g)
        v = flush(flush(v * _scalar(step.beta2)) + square)
        p = flush(p * _scalar(step.decay))
        scaled_root = flush(np.sqrt(v) * _scalar(step.inverse_sqrt_bias_correction2))
        denominator = flush(scaled_root + _scalar(step.eps))
        p = flush(p - flush(_scalar(step.step_size) * flush(m / denominator)))
    return p, m, v


def adagrad(step: AdagradStep, gradient: Floats, state: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """Return master and sum after one step of Adagrad, otherwise as :func:`adam`."""
    with np.errstate(all="ignore"):
        p, s = (flush(array) for array in state)
        g = _decayed(gradient, p, step.gradient_scale, step.weight_decay)
        s = flush(s + flush(g * g))
        denominator = flush(np.sqrt(s) + _scalar(step.eps))
        p = flush(p - flush(_scalar(step.step_size) * flush(g / denominator)))
    return p, s


def sgd(step: SgdStep, gradient: Floats, state: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """Return master and momentum_buffer after one step of SGD, otherwise as :func:`adam`."""
    with np.errstate(all="ignore"):
        p, b = (flush(array) for array in state)
        g = _decayed(gradient, p, step.gradient_scale, step.weight_decay)
        keep = _scalar(step.buffer_coefficient)
        kept = flush(keep * b) if keep != 0 else np.zeros_like(b)
        b = flush(kept + flush(_scalar(step.gradient_coefficient) * g))
        momentum = _scalar(step.nesterov_momentum)
        direction = flush(g + flush(momentum * b)) if momentum != 0 else b
        p = flush(p - flush(_scalar(step.lr) * direction))
    return p, b


def rmsprop(step: RmspropStep, gradient: Floats, state: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """Return master, square_avg, momentum_buffer and grad_avg after a step of RMSprop, otherwise as :func:`adam`."""
    _, _, b, a = state  # an array that a step does not use keeps every bit
    with np.errstate(all="ignore"):
        p, v, buffer, average = (flush(array) for array in state)
        g = _decayed(gradient, p, step.gradient_scale, step.weight_decay)
        square = flush(flush(_scalar(step.one_minus_alpha) * g) * g)
        v = variance = flush(flush(v * _scalar(step.alpha)) + square)
        if step.centered:
            a = _lerp(average, g, _scalar(step.one_minus_alpha))
            variance = flush(v - flush(a * a))
        change = flush(g / flush(np.sqrt(variance) + _scalar(step.eps)))
        if step.momentum:
            b = change = flush(flush(_scalar(step.momentum) * buffer) + change)
        p = flush(p - flush(_scalar(step.lr) * change))
    return p, v, b, a


RULES: dict[type, Callable[[Any, Floats, tuple[Floats, ...]], tuple[Floats, ...]]] = {
    AdamStep: adam,
    AdagradStep: adagrad,
    SgdStep: sgd,
    RmspropStep: rmsprop,
}
"""The function of each class of step."""


def _scalar(value: float) -> np.float32:
    return np.float32(flush(np.asarray(value, np.float32)))


def _decayed(gradient: Floats, master: Floats, scale: float, weight_decay: float) -> Floats:
    """Return the scaled gradient with weight decay added."""
    g = flush(flush(gradient) * _scalar(scale))
    decay = _scalar(weight_decay)
    return flush(g + flush(decay * master)) if decay != 0 else g


def _lerp(start: Floats, end: Floats, weight: np.float32) -> Floats:
    gap = flush(end - start)
    if weight < np.float32(0.5):
        return flush(start + flush(weight * gap))
    return flush(end - flush(gap * (np.float32(1) - weight)))


# ---- golden vectors

Bits = npt.NDArray[Any]
"""Values as they lie in memory: fp32, or 16-bit patterns as int16."""

DTYPES = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]

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
    rule.name: [step for step in STEPS.values() if type(step).__name__ == rule.step] for rule in DESCRIPTIONS
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
    import torch  # here, as programs that tests start need nothing of it, and start ten times as fast without

    return torch.from_numpy(values).to(getattr(torch, dtype.name.lower())).view(torch.int16).numpy().copy()


def decode(values: Bits, dtype: DType) -> Floats:
    """Return stored values as fp32."""
    if dtype is DType.FLOAT32:
        return values.copy()
    import torch

    return torch.from_numpy(values).view(getattr(torch, dtype.name.lower())).float().numpy()


def assert_all_same_bits(found: Iterable[Bits], expected: Iterable[Bits]) -> None:
    """Assert that arrays are equal pair by pair, as :func:`assert_same_bits` does."""
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


def assert_same_bits(found: Bits, expected: Bits) -> None:
    """Assert that two arrays are equal bit for bit; in fp32 any NaN equals any other."""
    assert found.dtype == expected.dtype
    if found.dtype == np.float32:
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), nan)
        found, expected = found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan]
    np.testing.assert_array_equal(found, expected)
