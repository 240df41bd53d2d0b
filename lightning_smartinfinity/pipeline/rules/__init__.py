"""Update rules compute the scalars of one step from a torch optimizer's hyperparameters, in double.

``docs/adding_an_optimizer.md`` shows how to add an optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_smartinfinity.common.update_rules import optimizer_names
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.pipeline.rules.adagrad import AdagradRule
from lightning_smartinfinity.pipeline.rules.adam import AdamRule
from lightning_smartinfinity.pipeline.rules.base import UpdateRule
from lightning_smartinfinity.pipeline.rules.rmsprop import RmspropRule
from lightning_smartinfinity.pipeline.rules.sgd import SgdRule

__all__ = ["UpdateRule", "rule_for"]

# The key is the exact type: AdamW subclasses Adam in torch, and a subclass may change the update.
_RULES: dict[type[Optimizer], UpdateRule] = {
    getattr(torch.optim, name): rule(name)
    for rule in (AdamRule, AdagradRule, SgdRule, RmspropRule)
    for name in rule.description.optimizers
}


def rule_for(optimizer: Optimizer) -> UpdateRule:
    """Return the rule of a torch optimizer, chosen by its exact type, and validate the param groups.

    Raises:
        UnsupportedError: The optimizer is unknown or a subclass, uses amsgrad, or has a parameter that is sparse or of
            no real floating dtype.
        ConfigError: A hyperparameter is not a finite number in torch's range.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None:
        raise _unknown(optimizer)
    rule.first_values(optimizer.defaults)
    for group in optimizer.param_groups:
        rule.snapshot(group)
        _require_real_parameters(rule, group)
        # foreach, fused and capturable only choose an implementation; differentiable asks for another result.
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
    return UnsupportedError(
        f"The optimizer {kind.__module__}.{kind.__qualname__}{detail} is not supported.",
        f"Use one of torch.optim's {optimizer_names()}.",
    )
