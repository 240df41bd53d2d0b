"""Settings of what a plan is made for: ``plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.settings.folders import names_file
from lightning_smartinfinity.settings.rules import (
    Rule,
    between,
    check,
    num_bytes,
    one_of,
    optional,
    require,
    settings_of,
)
from lightning_smartinfinity.settings.wrong_names import named_settings

__all__ = ["PlanConfig", "plan_config"]

_MOST_TOKENS = 10**9

_FORMATS = Rule(
    f"Pass a list of {', '.join(map(repr, STATE_FORMATS))}",
    lambda names: isinstance(names, (list, tuple)) and all(name in STATE_FORMATS for name in names),
    "names no state formats",
    tuple,
)


@named_settings
@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Tells ``plan="auto"`` what it cannot see by itself, and what it may use.

    Sizes are bytes, or text such as ``"64GB"``.

    Args:
        model: Model that will be trained, as ``smart-infinity plan`` takes it: folder or name of a Hugging Face model,
            ``package.module:Class``, or a number of parameters such as ``"7B"``. None: the module itself is looked at,
            before it is built where ``configure_model`` builds it.
        batch: Sequences of a micro-batch, per process.
        seq: Tokens of a sequence.
        optimizer: Class of torch.optim, such as ``"SGD"``. None: that of ``fabric.setup``, or else ``"AdamW"``. An
            optimizer of another class whose state does not fit is refused when the training is set up.
        state_formats: State formats that may be chosen where that of ``state_format`` does not fit, in this order.
            Those that do not exist for the optimizer or the precision are passed over.
        host_memory: Memory that all processes of a machine may use together. None: nine tenths of what is free.
        gpu_memory: Memory of each GPU that may be used. None: nine tenths of it.
        disk: Space that may be used on the storage of a machine. None: nine tenths of what is free.

    Raises:
        ConfigError: A setting is unknown, out of range or not one of those above.
    """

    model: str | None = None
    batch: int = 1
    seq: int = 512
    optimizer: str | None = None
    state_formats: Sequence[str] = ()
    host_memory: int | str | None = None
    gpu_memory: int | str | None = None
    disk: int | str | None = None

    def __post_init__(self) -> None:
        size = optional(num_bytes(1))
        require(
            self,
            model=optional(Rule("Pass a folder, a class or a number of parameters", names_file, "names no model")),
            batch=between(1, _MOST_TOKENS),
            seq=between(1, _MOST_TOKENS),
            optimizer=optional(one_of(*(name for rule in RULES for name in rule.optimizers))),
            state_formats=_FORMATS,
            host_memory=size,
            gpu_memory=size,
            disk=size,
        )


def plan_config(plan: PlanConfig | Mapping[str, Any] | str | None, *, owner: str) -> PlanConfig | None:
    """Return what the setting ``plan`` asks for: settings, a dict of them, ``"auto"`` for the defaults, or None.

    Args:
        plan: The setting.
        owner: Class to which it was passed, for the error.

    Raises:
        ConfigError: It is something else, or a setting in it is unknown or out of range.
    """
    if isinstance(plan, str) and plan == "auto":
        return PlanConfig()
    rule = replace(optional(settings_of(PlanConfig)), remedy="Pass 'auto', or a PlanConfig or a dict of its settings")
    config: PlanConfig | None = check(owner, "plan", plan, rule)
    return config
