"""Computes every update rule in numpy: one fp32 operation at a time, subnormals flushed before and after each.

That is the arithmetic of a compute thread and of an accelerator's floating-point operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES as DESCRIPTIONS
from lightning_smartinfinity.native import AdagradStep, AdamStep, RmspropStep, SgdStep

__all__ = [
    "ARRAYS",
    "RULES",
    "Floats",
    "adagrad",
    "adagrad_step",
    "adam",
    "adam_step",
    "flush",
    "rmsprop",
    "rmsprop_step",
    "sgd",
    "sgd_step",
]

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
