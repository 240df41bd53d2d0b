"""Settings of a memory plan: ``plan``."""

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
    """Facts that ``plan="auto"`` cannot find out by itself, and limits on the resources that it may use.

    Sizes are bytes, or text such as ``"64GB"``.

    Args:
        model: Model that will be trained, in the form of ``smart-infinity plan``: folder or name of a Hugging Face
            model, ``package.module:Class``, or a number of parameters such as ``"7B"``. None: the plan inspects the
            module itself, even before ``configure_model`` has built it.
        batch: Sequences of a micro-batch, per process.
        seq: Tokens of a sequence.
        optimizer: Class of torch.optim, such as ``"SGD"``. None: the class passed to ``fabric.setup``, or else
            ``"AdamW"``. If the training's optimizer has another class whose state does not fit, set-up raises an error.
        state_formats: State formats to try, in this order, if the one of ``state_format`` does not fit. Formats that do
            not exist for the optimizer or the precision are skipped.
        host_memory: Memory that all processes of a machine may use together. None: nine tenths of the free memory.
        gpu_memory: Memory that may be used on each GPU. None: nine tenths of the GPU's memory.
        disk: Space that may be used on the storage of a machine. None: nine tenths of the free space.

    Raises:
        ConfigError: A setting is unknown or has a forbidden value.
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
    """Return the setting ``plan`` as an object; it may be an object, a dict, ``"auto"`` (the defaults) or None (kept).

    Args:
        plan: The setting.
        owner: Class to which it was passed, for the error.

    Raises:
        ConfigError: The value is none of these, or a setting in it is unknown or out of range.
    """
    if isinstance(plan, str) and plan == "auto":
        return PlanConfig()
    rule = replace(optional(settings_of(PlanConfig)), remedy="Pass 'auto', or a PlanConfig or a dict of its settings")
    config: PlanConfig | None = check(owner, "plan", plan, rule)
    return config
