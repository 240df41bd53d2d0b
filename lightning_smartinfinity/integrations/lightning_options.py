"""Settings that our strategies share with Lightning's own: further options, the precision plugin, the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypedDict

import torch
from torch.distributed.constants import default_pg_timeout

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.settings.options import refuse_unknown
from lightning_smartinfinity.settings.rules import FLAG, Rule, between, check, instance, number, optional

__all__ = ["SharedOptions", "checked_options", "indexed_device", "swapped_precision", "take_options"]


class SharedOptions(TypedDict, total=False):
    """Settings of Lightning's strategies that both the Trainer's and Fabric's strategy accept."""

    parallel_devices: list[torch.device] | None
    process_group_backend: str | None
    timeout: timedelta | None
    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    min_loss_scale: int
    exclude_frozen_parameters: bool
    load_full_weights: bool


# Defaults of arguments that DeepSpeedStrategy.__init__ keeps under the same names.
_DEFAULTS: dict[str, Any] = {
    "exclude_frozen_parameters": False,
    "load_full_weights": False,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_SCALE = number(0, sys.float_info.max)
_WHOLE_SCALE = Rule("Pass a whole number of at least 0", lambda value: _SCALE.holds(value) and value % 1 == 0, kept=int)
_RULES = {
    "timeout": optional(instance(timedelta)),
    "loss_scale": _SCALE,
    "initial_scale_power": between(0, 127),  # beyond, fp32 gradients overflow
    "loss_scale_window": between(1, sys.maxsize),
    "hysteresis": between(1, sys.maxsize),
    "min_loss_scale": _WHOLE_SCALE,
    "exclude_frozen_parameters": FLAG,
    "load_full_weights": FLAG,
}


def take_options(strategy: Any, options: Mapping[str, Any], *, known: type, remedies: Mapping[str, str]) -> None:
    """Set the attributes that ``DeepSpeedStrategy.__init__`` would have set.

    Our strategies skip that constructor. It imports deepspeed, which fixes the accelerator before the Trainer has
    chosen one.

    Args:
        strategy: The strategy.
        options: Options that the user passed in addition to our own settings.
        known: TypedDict of the options that Lightning's strategy accepts.
        remedies: What to write instead of other options.

    Raises:
        ConfigError: Options are unknown, or one is out of range; the message names them.
    """
    refuse_unknown(type(strategy).__name__, options, known=known.__annotations__, remedies=remedies)
    options = checked_options(type(strategy).__name__, options)
    for name, default in _DEFAULTS.items():
        setattr(strategy, name, options.get(name, default))
    others = {
        "_timeout": options.get("timeout", default_pg_timeout),
        "_config_initialized": False,
        "remote_device": None,
    }
    for name, value in others.items():
        setattr(strategy, name, value)


def checked_options(strategy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked options. DeepSpeed would refuse some values late, only in fp16, or not at all.

    Args:
        strategy: Class name, for the message.
        options: Options of Lightning that the user passed in addition to our own settings.

    Raises:
        ConfigError: An option is out of range; the message names it.
    """
    return {
        name: check(strategy, name, value, _RULES[name]) if name in _RULES else value for name, value in options.items()
    }


def indexed_device(device: torch.device, local_rank: int) -> torch.device:
    """Return the device with an index. DeepSpeed needs one for a CPU, too."""
    return torch.device("cpu", local_rank) if device.type == "cpu" else device


def swapped_precision(plugin: Any, *, stock: type, own: Callable[[Any], Any], entry: str) -> Any:
    """Return our precision plugin instead of the stock one, which Lightning builds for every ``DeepSpeedStrategy``.

    Args:
        plugin: Plugin from Lightning's connector or from the user; None if none is chosen yet.
        stock: Class that the connector builds.
        own: Function that builds our plugin from the precision's name.
        entry: ``"Trainer"`` or ``"Fabric"``, for the message.

    Raises:
        UnsupportedError: DeepSpeed cannot work with the plugin.
    """
    if plugin is None:
        return None
    if not isinstance(plugin, stock):
        raise UnsupportedError(
            f"{type(plugin).__name__} does not work with the smart_infinity strategy.",
            f"Pass {entry}(precision=...) by name.",
        )
    return own(plugin.precision) if type(plugin) is stock else plugin  # type: ignore[attr-defined]
