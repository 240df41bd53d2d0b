"""Checks of the strategy's settings: values in, validated values or our own errors out."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_smartinfinity.config import SmartSSDConfig, TransferConfig
from lightning_smartinfinity.errors import CheckpointError, ConfigError
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where

__all__ = [
    "check_absent",
    "check_choices",
    "check_lightning_options",
    "check_save_path",
    "checked_smartssd",
    "checked_transfer",
    "gradients_are_16_bit",
    "is_16_bit",
    "nvme_path_of",
    "storage_folders",
]

_FLAGS = ("exclude_frozen_parameters", "load_full_weights")
# Kind, smallest and largest value.
_NUMBERS: dict[str, tuple[type, int, float]] = {
    "loss_scale": (float, 0, sys.float_info.max),
    "initial_scale_power": (int, 0, 127),  # beyond, fp32 gradients overflow
    "loss_scale_window": (int, 1, sys.maxsize),
    "hysteresis": (int, 1, sys.maxsize),
    "min_loss_scale": (float, 0, sys.float_info.max),
}
_CHOICES = {
    "update_device": ("auto", "host", "smartssd"),
    "state_format": tuple(STATE_FORMATS),
    "overlap": ("auto", "none", "forward", "backward"),
}


def check_choices(**values: str) -> None:
    """Each value is one that this version has."""
    for name, value in values.items():
        if value not in _CHOICES[name]:
            raise ConfigError(
                f"The smart_infinity strategy has no {name}={value!r}.",
                f"Use one of: {', '.join(map(repr, _CHOICES[name]))}.",
            )


def check_absent(**values: object) -> None:
    """Nothing is passed for what this version does not have."""
    for name, value in values.items():
        if value is not None:
            raise ConfigError(
                f"The smart_infinity strategy has no {name}={value!r} in this version.", f"Remove {name}."
            )


def storage_folders(storage: str | Path | Sequence[str | Path] | None) -> tuple[Path, ...] | None:
    """Absolute, distinct folders; None: not chosen by the user."""
    if storage is None:
        return None
    given: list[Any] = list(storage) if isinstance(storage, (list, tuple)) else [storage]
    folders = [folder for folder in given if isinstance(folder, (str, Path)) and str(folder)]
    if not folders or len(folders) != len(given):
        raise ConfigError(
            f"storage={storage!r} of the smart_infinity strategy names no folder.",
            "Pass a folder or a list of folders.",
        )
    resolved = tuple(_resolved(folder, setting=f"storage={storage!r}") for folder in folders)
    if len(set(resolved)) != len(resolved):
        raise ConfigError(
            f"storage={storage!r} of the smart_infinity strategy names a folder twice.", "Name each folder once."
        )
    return resolved


def check_lightning_options(options: Mapping[str, Any]) -> None:
    """What Lightning hands on to DeepSpeed, which would refuse it late, only in fp16, or not at all."""
    for name, value in options.items():
        if name in _NUMBERS:
            kind, minimum, maximum = _NUMBERS[name]
            valid, wanted = _is_number(value, kind, minimum, maximum), f"{kind.__name__} from {minimum} to {maximum}"
        elif name in _FLAGS:
            valid, wanted = isinstance(value, bool), "bool"
        elif name == "timeout":
            valid, wanted = value is None or isinstance(value, timedelta), "datetime.timedelta"
        else:
            continue
        if not valid:
            raise ConfigError(
                f"{name}={value!r} of the smart_infinity strategy is out of range.",
                f"Pass a value of this kind: {wanted}.",
            )


def _is_number(value: object, kind: type, minimum: int, maximum: float) -> bool:
    kinds = (int, float) if kind is float else (int,)
    # A comparison with NaN is false.
    return isinstance(value, kinds) and not isinstance(value, bool) and minimum <= value <= maximum


def check_save_path(path: object) -> None:
    """A checkpoint has a folder of its own: the current one, which an empty path means, is nobody's choice."""
    if not isinstance(path, (str, os.PathLike)) or os.fspath(path) in ("", os.curdir) or "\0" in str(path):
        raise CheckpointError(
            f"{path!r} names no folder to save a checkpoint into.", "Pass a path such as 'last.ckpt'."
        )


def checked_transfer(transfer: TransferConfig | None) -> TransferConfig:
    """The transfer settings, or their defaults."""
    if transfer is None:
        return TransferConfig()
    if not isinstance(transfer, TransferConfig):
        raise ConfigError(
            f"transfer={transfer!r} of the smart_infinity strategy is not a TransferConfig.",
            "Pass transfer=TransferConfig(...).",
        )
    return transfer


def checked_smartssd(
    smartssd: SmartSSDConfig | None, *, update_device: str, state_format: str
) -> SmartSSDConfig | None:
    """The settings of cards, which have to fit the others."""
    if smartssd is not None and not isinstance(smartssd, SmartSSDConfig):
        raise ConfigError(
            f"smartssd={smartssd!r} of the smart_infinity strategy is not a SmartSSDConfig.",
            "Pass smartssd=SmartSSDConfig(...).",
        )
    if update_device == "smartssd" and not STATE_FORMATS[state_format].on_cards:
        on_cards = names_where(lambda form: form.on_cards)
        raise ConfigError(
            f"update_device='smartssd' holds optimizer state in {on_cards} alone, not in"
            f" state_format={state_format!r}.",
            f"Use state_format={on_cards}, or update_device='host'.",
        )
    if update_device == "host" and smartssd is not None:
        warnings.warn("smartssd=... is ignored with update_device='host'.", stacklevel=4)
    return smartssd


def nvme_path_of(zero: Mapping[str, Any] | None) -> Path | None:
    """The folder that ``zero={"offload_param": {"nvme_path": ...}}`` names for the parameters, if it does."""
    offload = zero.get("offload_param") if isinstance(zero, Mapping) else None
    path = offload.get("nvme_path") if isinstance(offload, Mapping) else None
    return (
        None if path is None else _resolved(str(path), setting=f"zero={{'offload_param': {{'nvme_path': {path!r}}}}}")
    )


def _resolved(folder: str | Path, *, setting: str) -> Path:
    try:
        return Path(folder).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, links in a circle, a null byte
        raise ConfigError(
            f"{setting} of the smart_infinity strategy cannot be a folder: {error}.", "Pass the path of a folder."
        ) from error


def is_16_bit(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's configuration says that parameters are bf16 or fp16."""
    return any(config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))


def gradients_are_16_bit(config: Mapping[str, Any]) -> bool:
    """Whether gradients are kept in the type of 16-bit parameters, and not in fp32, where several are added."""
    return is_16_bit(config) and config.get("data_types", {}).get("grad_accum_dtype") != "fp32"
