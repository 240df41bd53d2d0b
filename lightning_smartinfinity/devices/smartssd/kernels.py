"""The kernels of the xclbin, by the torch optimizer that each of them steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_smartinfinity import native
from lightning_smartinfinity.native.steps import UpdateStep

__all__ = ["KERNELS", "LARGEST_NUMEL", "Kernel", "kernel_of"]

LARGEST_NUMEL = 1 << 29
"""Elements of the largest tasklet that a kernel works."""


@dataclass(frozen=True)
class Kernel:
    """One update rule on a card.

    Args:
        name: In the xclbin.
        optimizers: Class names of torch's.
        num_arrays: Per element on storage, the master among them.
        example: Scalars of a step that touches every part of its arithmetic, for self-tests.
    """

    name: str
    optimizers: tuple[str, ...]
    num_arrays: int
    example: Callable[[], UpdateStep]


def _adam() -> native.AdamStep:
    return native.AdamStep(
        gradient_scale=0.5,
        beta1=0.9,
        one_minus_beta1=0.1,
        beta2=0.999,
        one_minus_beta2=0.001,
        decay=0.999,
        l2=0.01,
        step_size=0.01,
        inverse_sqrt_bias_correction2=10.0,
        eps=1e-8,
        seed=1,
    )


def _adagrad() -> native.AdagradStep:
    return native.AdagradStep(gradient_scale=0.5, weight_decay=0.01, step_size=0.01, eps=1e-10)


def _sgd() -> native.SgdStep:
    return native.SgdStep(
        gradient_scale=0.5,
        weight_decay=0.01,
        buffer_coefficient=0.9,
        gradient_coefficient=0.75,
        nesterov_momentum=0.9,
        lr=0.01,
    )


KERNELS = (
    Kernel("adamw_update", ("Adam", "AdamW"), 3, _adam),
    Kernel("adagrad_update", ("Adagrad",), 2, _adagrad),
    Kernel("sgd_update", ("SGD",), 2, _sgd),
)


def kernel_of(optimizer: str) -> Kernel:
    """The kernel of a torch optimizer, by its class name (``UpdateRule.name``)."""
    return next(kernel for kernel in KERNELS if optimizer in kernel.optimizers)
