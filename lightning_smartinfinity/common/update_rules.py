"""The single description of every update rule: its arrays, the scalars of one step, its formula, its kernel.

All code that depends on a rule is derived from here: the native core's structs, bindings and tables
(``tools/generate_update_rules.py``, at build time), the kernels of a card (``hls/description.py``), the simulator, the
command line and messages. This module imports only the standard library, since builds run it before anything is
installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ADAGRAD", "ADAMW", "RMSPROP", "RULES", "SGD", "Operators", "RuleDescription", "optimizer_names"]


@dataclass(frozen=True)
class Operators:
    """Number of floating-point operators of each kind in a kernel's source, per element."""

    multiply: int
    add: int
    divide: int
    root: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RuleDescription:
    """Description of one update rule.

    Attributes:
        name: Name of the rule in commands. A card's kernel is named ``<name>_update``.
        number: Number that identifies the kernel in its status; unique among rules.
        optimizers: Class names of the torch optimizers that use this rule.
        step: Name of the native class that holds the scalars of one step.
        arrays: Names of the fp32 arrays that the rule keeps per element: ``"master"``, then torch's names.
        scalars: Names of the fp32 scalars of one step, in the order in which a card's kernel receives their bits. Each
            has a value for the self-test; together these values cover all of the arithmetic.
        formula: One step in words, for the documentation of the native class.
        operators: Floating-point operators of the kernel.
        seeded: Whether a step also has a ``seed`` for stochastic rounding, which cards do not receive.
    """

    name: str
    number: int
    optimizers: tuple[str, ...]
    step: str
    arrays: tuple[str, ...]
    scalars: Mapping[str, float]
    formula: str
    operators: Operators
    seeded: bool = False

    @property
    def kernel(self) -> str:
        """Name of a card's kernel."""
        return f"{self.name}_update"


ADAMW = RuleDescription(
    name="adamw",
    number=1,
    optimizers=("Adam", "AdamW"),
    step="AdamStep",
    arrays=("master", "exp_avg", "exp_avg_sq"),
    scalars={
        "gradient_scale": 0.5,
        "one_minus_beta1": 0.1,
        "beta2": 0.999,
        "one_minus_beta2": 0.001,
        "decay": 0.999,  # 1 - lr * weight_decay (AdamW), or 1
        "l2": 0.01,  # weight_decay (Adam), or 0
        "step_size": 0.01,  # lr / (1 - beta1 ** step)
        "inverse_sqrt_bias_correction2": 10.0,
        "eps": 1e-8,
    },
    formula="""
        g = gradient * gradient_scale (+ l2 * p); m, v as in torch;
        p = p * decay - step_size * (m / (sqrt(v) * inverse_sqrt_bias_correction2 + eps)).
        The seed is the number of the update: formats with stochastic rounding use it.
    """,
    operators=Operators(multiply=10, add=7, divide=1, root=1),
    seeded=True,
)
ADAGRAD = RuleDescription(
    name="adagrad",
    number=2,
    optimizers=("Adagrad",),
    step="AdagradStep",
    arrays=("master", "sum"),
    scalars={
        "gradient_scale": 0.5,
        "weight_decay": 0.01,
        "step_size": 0.01,  # lr / (1 + (step - 1) * lr_decay)
        "eps": 1e-10,
    },
    formula="""
        g = gradient * gradient_scale (+ weight_decay * p); s = s + g * g;
        p = p - step_size * (g / (sqrt(s) + eps)).
    """,
    operators=Operators(multiply=4, add=4, divide=1, root=1),
)
SGD = RuleDescription(
    name="sgd",
    number=3,
    optimizers=("SGD",),
    step="SgdStep",
    arrays=("master", "momentum_buffer"),
    scalars={
        "gradient_scale": 0.5,
        "weight_decay": 0.01,
        "buffer_coefficient": 0.9,  # momentum, or 0 where the buffer starts
        "gradient_coefficient": 0.75,  # 1 - dampening, or 1 where the buffer starts
        "nesterov_momentum": 0.9,  # momentum, or 0 without Nesterov's
        "lr": 0.01,
    },
    formula="""
        g = gradient * gradient_scale (+ weight_decay * p);
        b = buffer_coefficient * b + gradient_coefficient * g;
        p = p - lr * (g + nesterov_momentum * b), or, where that is 0, p - lr * b.
        A buffer_coefficient of 0 forgets the buffer, even what is not finite in it.
    """,
    operators=Operators(multiply=6, add=4, divide=0, root=0),
)
RMSPROP = RuleDescription(
    name="rmsprop",
    number=4,
    optimizers=("RMSprop",),
    step="RmspropStep",
    arrays=("master", "square_avg", "momentum_buffer", "grad_avg"),
    scalars={
        "gradient_scale": 0.5,
        "weight_decay": 0.01,
        "alpha": 1e4,  # so large that no variance is negative in the self-test
        "one_minus_alpha": 0.999,
        "eps": 1e-8,
        "momentum": 0.9,
        "centered": 1.0,  # or 0
        "lr": 0.01,
    },
    formula="""
        g = gradient * gradient_scale (+ weight_decay * p); v = alpha * v + one_minus_alpha * g * g;
        a = torch.lerp(a, g, one_minus_alpha) where centered; d = g / (sqrt(v (- a * a)) + eps);
        b = momentum * b + d where there is momentum; p = p - lr * (b or d).
        Without momentum b stays as it is, and not centered a does.
    """,
    operators=Operators(multiply=10, add=9, divide=1, root=1),
)

RULES = (ADAMW, ADAGRAD, SGD, RMSPROP)
"""Every rule. The order matters only for lists and tables that people read."""


def optimizer_names() -> str:
    """List the class names of torch's optimizers that have a rule, for messages."""
    *others, last = (name for rule in RULES for name in rule.optimizers)
    return f"{', '.join(others)} and {last}"
