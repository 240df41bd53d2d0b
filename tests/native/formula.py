"""The update in numpy: one fp32 operation at a time, subnormals flushed after each, as on a compute thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_smartinfinity.native import AdamStep

__all__ = ["Floats", "adam", "adam_step", "flush"]

Floats = npt.NDArray[np.float32]


def adam_step(*, seed: int = 0, **changes: float) -> AdamStep:
    """The tenth step of AdamW with torch's defaults, with changes."""
    step = 10
    values = {
        "gradient_scale": 1.0,
        "beta1": 0.9,
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


def flush(values: Floats) -> Floats:
    """Subnormals as zeros of their sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values).astype(np.float32)


def adam(step: AdamStep, gradient: Floats, state: tuple[Floats, Floats, Floats]) -> tuple[Floats, Floats, Floats]:
    """Master, exp_avg and exp_avg_sq after one step.

    Args:
        step: The scalars.
        gradient: fp32, unscaled.
        state: fp32 master, exp_avg and exp_avg_sq; not changed.
    """
    with np.errstate(all="ignore"):
        p, m, v = (flush(array) for array in state)
        g = flush(flush(gradient) * np.float32(step.gradient_scale))
        if step.l2 != 0:
            g = flush(g + flush(np.float32(step.l2) * p))
        m = _lerp(m, g, np.float32(step.one_minus_beta1))
        square = flush(flush(np.float32(step.one_minus_beta2) * g) * g)
        v = flush(flush(v * np.float32(step.beta2)) + square)
        p = flush(p * np.float32(step.decay))
        scaled_root = flush(np.sqrt(v) * np.float32(step.inverse_sqrt_bias_correction2))
        denominator = flush(scaled_root + np.float32(step.eps))
        p = flush(p - flush(np.float32(step.step_size) * flush(m / denominator)))
    return p, m, v


def _lerp(start: Floats, end: Floats, weight: np.float32) -> Floats:
    gap = flush(end - start)
    if weight < np.float32(0.5):
        return flush(start + flush(weight * gap))
    return flush(end - flush(gap * (np.float32(1) - weight)))
