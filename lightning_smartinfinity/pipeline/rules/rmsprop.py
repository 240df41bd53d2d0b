"""torch.optim.RMSprop."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RMSPROP
from lightning_smartinfinity.native.formats import formats_of
from lightning_smartinfinity.pipeline.rules.base import UpdateRule

__all__ = ["RmspropHyperparameters", "RmspropRule"]

# Key of a param group, saved with it: the arrays that the group has had so far.
_KEPT = "kept_arrays"


@dataclass(frozen=True, kw_only=True, slots=True)
class RmspropHyperparameters:
    """The settings of a param group that RMSprop reads."""

    lr: float
    alpha: float
    eps: float
    momentum: float
    centered: bool
    weight_decay: float
    maximize: bool


class RmspropRule(UpdateRule):
    """torch.optim.RMSprop.

    Storage has room for ``momentum_buffer`` and ``grad_avg`` even if no group has momentum or is centered: groups may
    change, but the size of the state and the arguments of a card's kernel may not. Checkpoints hold only what torch
    would keep: an array stays when momentum or centering is switched off, because it is used again when they are
    switched on.
    """

    description = RMSPROP
    distinctive_setting = "centered"
    counts_updates = True
    state_formats = formats_of(native.RmspropStep)

    @override
    def snapshot(self, group: MutableMapping[str, Any]) -> RmspropHyperparameters:
        group[_KEPT] = list(self.kept_arrays([group]))
        return RmspropHyperparameters(
            lr=self.number("lr", group["lr"]),
            alpha=self.number("alpha", group["alpha"]),
            eps=self.number("eps", group["eps"]),
            momentum=self.number("momentum", group["momentum"]),
            centered=bool(group["centered"]),
            weight_decay=self.number("weight_decay", group["weight_decay"]),
            maximize=bool(group.get("maximize", False)),
        )

    @override
    def scalars(
        self, hyperparameters: RmspropHyperparameters, *, step: int, gradient_scale: float
    ) -> native.RmspropStep:
        assert step >= 1
        h = hyperparameters
        return native.RmspropStep(
            gradient_scale=-gradient_scale if h.maximize else gradient_scale,
            weight_decay=h.weight_decay,
            alpha=h.alpha,
            one_minus_alpha=1 - h.alpha,
            eps=h.eps,
            momentum=h.momentum,
            centered=float(h.centered),
            lr=h.lr,
        )

    @override
    def kept_arrays(self, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        kept = {"square_avg"}.union(*(group.get(_KEPT, ()) for group in groups))
        if any(group["momentum"] > 0 for group in groups):
            kept.add("momentum_buffer")
        if any(group["centered"] for group in groups):
            kept.add("grad_avg")
        return tuple(name for name in self.arrays if name in kept)
