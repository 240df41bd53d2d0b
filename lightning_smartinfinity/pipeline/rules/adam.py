"""torch.optim.Adam and torch.optim.AdamW."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import ADAMW
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.native.formats import formats_of
from lightning_smartinfinity.pipeline.rules.base import UpdateRule

__all__ = ["AdamHyperparameters", "AdamRule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamHyperparameters:
    """The settings of a param group that Adam and AdamW read."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    maximize: bool


class AdamRule(UpdateRule):
    """torch.optim.Adam and torch.optim.AdamW."""

    description = ADAMW
    distinctive_setting = "betas"
    counts_updates = True
    state_formats = formats_of(native.AdamStep)

    @override
    def snapshot(self, group: MutableMapping[str, Any]) -> AdamHyperparameters:
        if group.get("amsgrad"):
            raise UnsupportedError(
                f"{self.name}(amsgrad=True) is not supported: its maximum of exp_avg_sq is not kept on storage.",
                "Use amsgrad=False.",
            )
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", self.name == "AdamW")  # torch before 2.7 has no such setting
        return AdamHyperparameters(
            lr=self.number("lr", group["lr"]),
            beta1=self.number("betas[0]", beta1, below=1.0),
            beta2=self.number("betas[1]", beta2, below=1.0),
            eps=self.number("eps", group["eps"]),
            weight_decay=self.number("weight_decay", group["weight_decay"]),
            decoupled_weight_decay=bool(decoupled),
            maximize=bool(group.get("maximize", False)),
        )

    @override
    def scalars(self, hyperparameters: AdamHyperparameters, *, step: int, gradient_scale: float) -> native.AdamStep:
        assert step >= 1
        h = hyperparameters
        return native.AdamStep(
            gradient_scale=-gradient_scale if h.maximize else gradient_scale,
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
