"""torch.optim.SGD."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import SGD
from lightning_smartinfinity.native.formats import formats_of
from lightning_smartinfinity.pipeline.rules.base import UpdateRule

__all__ = ["SgdHyperparameters", "SgdRule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SgdHyperparameters:
    """The settings of a param group that SGD reads."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool


class SgdRule(UpdateRule):
    """torch.optim.SGD.

    torch has no ``momentum_buffer`` before the first update with momentum, which sets it to its gradient. Here a
    parameter's count is its number of updates since then. An update without momentum resets the count, so that the next
    one with momentum starts a new buffer. (torch would continue with the buffer from before momentum became zero.)
    """

    description = SGD
    distinctive_setting = "nesterov"
    counts_updates = False
    state_formats = formats_of(native.SgdStep)

    @override
    def snapshot(self, group: MutableMapping[str, Any]) -> SgdHyperparameters:
        return SgdHyperparameters(
            lr=self.number("lr", group["lr"]),
            momentum=self.number("momentum", group["momentum"]),
            dampening=self.number("dampening", group["dampening"], least=-math.inf),
            nesterov=bool(group["nesterov"]),
            weight_decay=self.number("weight_decay", group["weight_decay"]),
            maximize=bool(group.get("maximize", False)),
        )

    @override
    def scalars(self, hyperparameters: SgdHyperparameters, *, step: int, gradient_scale: float) -> native.SgdStep:
        assert step >= 1
        h = hyperparameters
        begins = step == 1 or h.momentum == 0
        return native.SgdStep(
            gradient_scale=-gradient_scale if h.maximize else gradient_scale,
            weight_decay=h.weight_decay,
            buffer_coefficient=0.0 if begins else h.momentum,
            gradient_coefficient=1.0 if begins else 1 - h.dampening,
            nesterov_momentum=h.momentum if h.nesterov else 0.0,
            lr=h.lr,
        )

    @override
    def count_after(self, hyperparameters: SgdHyperparameters, step: int) -> int:
        return step if hyperparameters.momentum else 0

    @override
    def holds_state(self, count: int) -> bool:
        return count > 0
