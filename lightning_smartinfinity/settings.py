"""Checks of the strategy's settings: values in, validated values or our own errors out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_smartinfinity.config import TransferConfig
from lightning_smartinfinity.errors import CheckpointError, ConfigError

__all__ = [
    "check_absent",
    "check_choices",
    "check_save_path",
    "checked_transfer",
    "is_16_bit",
    "nvme_path_of",
    "storage_folders",
]

_CHOICES = {
    "update_device": ("auto", "host"),
    "state_format": ("fp32",),
    "overlap": ("auto", "none"),
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
    resolved = tuple(Path(folder).expanduser().resolve() for folder in folders)
    if len(set(resolved)) != len(resolved):
        raise ConfigError(
            f"storage={storage!r} of the smart_infinity strategy names a folder twice.", "Name each folder once."
        )
    return resolved


def check_save_path(path: object) -> None:
    """A checkpoint has a folder of its own: the current one, which an empty path means, is nobody's choice."""
    if not isinstance(path, (str, os.PathLike)) or os.fspath(path) in ("", os.curdir):
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


def nvme_path_of(zero: Mapping[str, Any] | None) -> str | None:
    """The folder that ``zero={"offload_param": {"nvme_path": ...}}`` names for the parameters, if it does."""
    offload = zero.get("offload_param") if isinstance(zero, Mapping) else None
    path = offload.get("nvme_path") if isinstance(offload, Mapping) else None
    return None if path is None else str(path)


def is_16_bit(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's configuration says that parameters are bf16 or fp16."""
    return any(config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))
