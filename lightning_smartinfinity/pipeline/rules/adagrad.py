"""torch.optim.Adagrad."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import ADAGRAD
from lightning_smartinfinity.native.formats import formats_of
from lightning_smartinfinity.pipeline.rules.base import UpdateRule

__all__ = ["AdagradHyperparameters", "AdagradRule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdagradHyperparameters:
    """The settings of a param group that Adagrad reads."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool


class AdagradRule(UpdateRule):
    """torch.optim.Adagrad."""

    description = ADAGRAD
    distinctive_setting = "lr_decay"
    counts_updates = True
    state_formats = formats_of(native.AdagradStep)

    @override
    def snapshot(self, group: MutableMapping[str, Any]) -> AdagradHyperparameters:
        return AdagradHyperparameters(
            lr=self.number("lr", group["lr"]),
            lr_decay=self.number("lr_decay", group["lr_decay"]),
            eps=self.number("eps", group["eps"]),
            weight_decay=self.number("weight_decay", group["weight_decay"]),
            maximize=bool(group.get("maximize", False)),
        )

    @override
    def scalars(
        self, hyperparameters: AdagradHyperparameters, *, step: int, gradient_scale: float
    ) -> native.AdagradStep:
        assert step >= 1
        h = hyperparameters
        return native.AdagradStep(
            gradient_scale=-gradient_scale if h.maximize else gradient_scale,
            weight_decay=h.weight_decay,
            step_size=h.lr / (1 + (step - 1) * h.lr_decay),
            eps=h.eps,
        )

    @override
    def first_values(self, defaults: Mapping[str, Any]) -> tuple[float, ...]:
        # Like torch, read this from the optimizer's constructor arguments, not from the groups.
        return (self.number("initial_accumulator_value", defaults["initial_accumulator_value"]),)
