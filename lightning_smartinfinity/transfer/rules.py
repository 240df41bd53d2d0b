"""Update rules: a torch optimizer's hyperparameters turned into the scalars of one step, computed in double.

A new optimizer is one :class:`UpdateRule` in ``_RULES``.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import ConfigError, UnsupportedError

__all__ = ["AdamHyperparameters", "AdamRule", "UpdateRule", "rule_for"]


class UpdateRule(ABC):
    """How one optimizer steps.

    Attributes:
        name: Class name of the torch optimizer, for messages.
        arrays: Names of the arrays per element on storage; the first is ``"master"``, the others are torch's
            names in ``optimizer.state``.
    """

    name: str
    arrays: tuple[str, ...]

    @abstractmethod
    def snapshot(self, group: Mapping[str, Any]) -> Hashable:
        """Read a param group's hyperparameters: hashable, and equal ones update equally.

        Raises:
            ConfigError: One is not a finite number in torch's range.
            UnsupportedError: One asks for something that is not offered.
        """

    @abstractmethod
    def scalars(self, hyperparameters: Any, *, step: int, gradient_scale: float) -> native.AdamStep:
        """The scalars of update number ``step`` (from 1) of a parameter.

        Args:
            hyperparameters: From :meth:`snapshot`.
            step: As torch counts: this update included.
            gradient_scale: Factor on every gradient.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamHyperparameters:
    """What Adam and AdamW read from a param group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    maximize: bool


class AdamRule(UpdateRule):
    """torch.optim.Adam and torch.optim.AdamW.

    Args:
        name: Class name of the optimizer.
        decoupled_weight_decay: What a group without a setting of that name means (torch before 2.7).
    """

    arrays = ("master", "exp_avg", "exp_avg_sq")

    def __init__(self, name: str, *, decoupled_weight_decay: bool) -> None:
        self.name = name
        self._decoupled_weight_decay = decoupled_weight_decay

    def snapshot(self, group: Mapping[str, Any]) -> AdamHyperparameters:
        if group.get("amsgrad"):
            raise UnsupportedError(
                f"{self.name}(amsgrad=True) is not supported: its maximum of exp_avg_sq is not kept on storage.",
                "Use amsgrad=False.",
            )
        beta1, beta2 = group["betas"]
        return AdamHyperparameters(
            lr=self._number("lr", group["lr"]),
            beta1=self._number("betas[0]", beta1, below=1.0),
            beta2=self._number("betas[1]", beta2, below=1.0),
            eps=self._number("eps", group["eps"]),
            weight_decay=self._number("weight_decay", group["weight_decay"]),
            decoupled_weight_decay=bool(group.get("decoupled_weight_decay", self._decoupled_weight_decay)),
            maximize=bool(group.get("maximize", False)),
        )

    def scalars(self, hyperparameters: AdamHyperparameters, *, step: int, gradient_scale: float) -> native.AdamStep:
        assert step >= 1
        h = hyperparameters
        return native.AdamStep(
            gradient_scale=-gradient_scale if h.maximize else gradient_scale,
            beta1=h.beta1,
            one_minus_beta1=1 - h.beta1,
            beta2=h.beta2,
            one_minus_beta2=1 - h.beta2,
            decay=1 - h.lr * h.weight_decay if h.decoupled_weight_decay else 1.0,
            l2=0.0 if h.decoupled_weight_decay else h.weight_decay,
            step_size=h.lr / (1 - h.beta1**step),
            inverse_sqrt_bias_correction2=1 / math.sqrt(1 - h.beta2**step),
            eps=h.eps,
            seed=step,
        )

    def _number(self, name: str, value: Any, *, below: float = math.inf) -> float:
        """A finite number in [0, below); tensors of one element count."""
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{self.name}({name}={value!r}) is not a number.", "Pass a float.") from error
        if not 0.0 <= number < below:
            bound = f"in [0, {below:g})" if below < math.inf else "finite and not negative"
            raise ConfigError(f"{self.name}({name}={number!r}) is out of range.", f"Keep it {bound}.")
        return number


# By exact type: AdamW subclasses Adam in torch, and a subclass may have changed the update.
_RULES: dict[type[Optimizer], UpdateRule] = {
    torch.optim.Adam: AdamRule("Adam", decoupled_weight_decay=False),
    torch.optim.AdamW: AdamRule("AdamW", decoupled_weight_decay=True),
}


def rule_for(optimizer: Optimizer) -> UpdateRule:
    """The rule of a torch optimizer, chosen by its exact type; its param groups are validated.

    Raises:
        UnsupportedError: A subclass, an unknown optimizer, amsgrad, or a parameter that is not real floating point.
        ConfigError: A hyperparameter is not a finite number in torch's range.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None:
        raise _unknown(optimizer)
    for group in optimizer.param_groups:
        rule.snapshot(group)
        _require_real_parameters(rule, group)
        # foreach, fused and capturable choose among implementations of one result; this one asks for something else.
        if group.get("differentiable"):
            warnings.warn(
                f"{rule.name}(differentiable=True) is ignored: updates run outside of autograd.", stacklevel=2
            )
    return rule


def _require_real_parameters(rule: UpdateRule, group: Mapping[str, Any]) -> None:
    for parameter in group["params"]:
        if parameter.layout != torch.strided or not parameter.is_floating_point():
            raise UnsupportedError(
                f"{rule.name} holds a parameter of dtype {parameter.dtype} and layout {parameter.layout}.",
                "Only dense parameters of a real floating dtype can be updated.",
            )


def _unknown(optimizer: Optimizer) -> UnsupportedError:
    kind = type(optimizer)
    parents = [base.__name__ for base in kind.__mro__[1:] if base in _RULES]
    detail = f", a subclass of {parents[0]}, which may have changed the update," if parents else ""
    supported = ", ".join(f"torch.optim.{base.__name__}" for base in _RULES)
    return UnsupportedError(
        f"The optimizer {kind.__module__}.{kind.__qualname__}{detail} is not supported.",
        f"Use one of: {supported}.",
    )
