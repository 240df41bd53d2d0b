"""The settings of a strategy: one frozen object, checked once, and one text that documents them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_smartinfinity.errors import CheckpointError, ConfigError
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where
from lightning_smartinfinity.settings import (
    CODEC,
    LOCAL_FOLDER,
    ActivationOffload,
    GradientCodec,
    PlanConfig,
    SmartSSDConfig,
    TransferConfig,
    activation_offload,
    plan_config,
    resolved_folder,
    storage_folders,
    transfer_config,
)
from lightning_smartinfinity.settings.rules import (
    STRATEGY,
    Rule,
    among,
    as_passed,
    check,
    instance,
    number,
    one_of,
    optional,
    require,
    settings_of,
)

__all__ = [
    "STORAGE",
    "STORAGE_OR_NEW",
    "StrategySettings",
    "check_save_path",
    "documents_settings",
    "given_settings",
    "data_types",
    "gradients_are_16_bit",
    "is_16_bit",
    "nvme_path_of",
]

STORAGE = "storage"
"""Takes the place of a checkpoint's path where an interrupted training resumes from its state on storage."""

STORAGE_OR_NEW = "storage-or-new"
"""Takes the place of a checkpoint's path where a training resumes if it can, and else begins at step 0."""

_CHOICES = {
    "update_device": ("auto", "host", "smartssd"),
    "state_format": tuple(STATE_FORMATS),
    "overlap": ("auto", "none", "forward", "backward"),
}


def _seconds_or_none(most: int) -> Rule:
    seconds = number(1, most)  # a busy machine would miss a shorter limit
    return Rule(
        f"{seconds.remedy}, or 0",
        lambda value: seconds.holds(value) or among((0,)).holds(value),
        kept=seconds.kept,
    )


_SECTION = Rule("Pass zero={...}", lambda value: isinstance(value, Mapping), "is not a mapping")
_ARGUMENTS = re.compile(r" *Args:\n(.+?\n)\n", re.DOTALL)

Strategy = TypeVar("Strategy", bound=type)


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """Settings of a strategy.

    Args:
        storage: Folder, or list with a folder per storage device. Default: folder ``smart_infinity`` in the Trainer's
            ``default_root_dir`` or ``output_dir``, or in the current folder with Fabric and Accelerate.
        update_device: Where the update runs: ``"host"`` (CPU), ``"smartssd"`` (the accelerators of SmartSSDs), or
            ``"auto"``: SmartSSDs if an xclbin is named and the SmartSSDs can be used; otherwise the host.
        smartssd: Settings for SmartSSDs: xclbin, cards, route of gradients, timeout and binding of XRT, as a
            :class:`SmartSSDConfig` or a dict such as ``{"xclbin": "kernels.xclbin"}``.
        state_format: Format of optimizer state on storage: ``"fp32"`` (12 bytes per parameter), ``"bf16"`` (8),
            ``"int8"`` (6) or, with parameters in bf16, ``"int8_remainder"`` (6, of which a step reads 4). Optimizers
            other than Adam and AdamW have only ``"fp32"`` (4 bytes per array).
        overlap: Passes during which the update may run: ``"none"``, ``"forward"`` (the next step's), ``"backward"``
            (its own step's, and the next forward), or ``"auto"`` (the fastest of these in the first steps).
        compression: How gradients are sent to the update: :class:`TopK` sends the largest ones, :class:`BlockScaled`
            sends all in 8 bits, None sends them unchanged. Compression helps where gradients cross a channel, as with
            SmartSSDs.
        activations: How many of the tensors that forward saves for backward move to storage, as an
            :class:`ActivationOffload` or a dict such as ``{"budget_bytes": "2GB"}``; ``{}`` means its defaults. None:
            all tensors stay in memory.
        transfer: Ring size, I/O engine, state kept in host memory, durability, direct I/O, and name and lifetime of
            the files, as a :class:`TransferConfig` or a dict such as ``{"num_buffers": 8}``.
        zero: Further keys of DeepSpeed's ``zero_optimization`` section, such as ``reduce_bucket_size``.
        plan: ``"auto"`` plans memory when a fit begins: from the free memory and storage, it chooses where parameters
            are kept, and the budgets of ``transfer`` and ``zero`` that you did not set. The choice is printed. A
            :class:`PlanConfig`, or a dict such as ``{"batch": 8, "seq": 2048}``, describes the training more closely.
            None keeps all defaults.
        watchdog_timeout: Seconds after which a rank whose process does not answer counts as lost, and all ranks end.
            None or 0: ranks are not watched.
        collective_timeout: Seconds that a rank, while it does other work, may keep the other ranks waiting in a gather,
            reduction or other collective. Then every rank raises :class:`RanksDivergedError`. Saves, loads, set-up and
            compilation may take longer. If every rank has ended or waits, but at different places, they raise within 30
            seconds. The default is shorter than torch's own limit of 30 minutes (Lightning's ``timeout``), whose error
            names no rank: raise both for longer work on one rank. Waits for a disk have a separate limit
            (``TransferConfig(io_timeout=...)``). None or 0, or without a watch over the ranks: only torch's limit
            applies.

    Raises:
        ConfigError: A setting is unknown, contradictory or out of range.
    """

    storage: tuple[Path, ...] | None = None
    update_device: str = "auto"
    smartssd: SmartSSDConfig | None = None
    state_format: str = "fp32"
    overlap: str = "auto"
    compression: GradientCodec | None = None
    activations: ActivationOffload | None = None
    transfer: TransferConfig = field(default_factory=TransferConfig)
    zero: Mapping[str, Any] | None = None
    plan: PlanConfig | None = None
    watchdog_timeout: float | None = 30.0
    collective_timeout: float | None = 1500.0
    owner: InitVar[str] = STRATEGY  # class that the user called; errors begin with it

    def __post_init__(self, owner: str) -> None:
        require(
            self,
            owner,
            **{name: one_of(*words) for name, words in _CHOICES.items()},
            smartssd=optional(instance(SmartSSDConfig)),
            compression=optional(CODEC),
            activations=optional(instance(ActivationOffload)),
            transfer=instance(TransferConfig),
            zero=optional(_SECTION),
            plan=optional(instance(PlanConfig)),
            watchdog_timeout=optional(_seconds_or_none(3600)),
            collective_timeout=optional(_seconds_or_none(7 * 24 * 3600)),
        )
        if self.update_device == "smartssd" and not STATE_FORMATS[self.state_format].on_cards:
            on_cards = names_where(lambda form: form.on_cards)
            raise ConfigError(
                f"{as_passed(owner, 'update_device', 'smartssd')} holds optimizer state in {on_cards} alone, not in"
                f" state_format={self.state_format!r}.",
                f"Use state_format={on_cards}, or update_device='host'.",
            )


def given_settings(owner: str, arguments: Mapping[str, Any]) -> StrategySettings:
    """Return the settings that a user passed to a class: folders in any form, other settings as objects or dicts.

    Args:
        owner: Name of the class, for errors.
        arguments: Values by name; only those of settings are read.

    Raises:
        ConfigError: A setting is unknown, contradictory or out of range.
    """
    given = {field.name: arguments[field.name] for field in fields(StrategySettings)}
    given["storage"] = storage_folders(given["storage"], owner=owner)
    given["smartssd"] = check(owner, "smartssd", given["smartssd"], optional(settings_of(SmartSSDConfig)))
    given["activations"] = activation_offload(given["activations"], owner=owner)
    given["transfer"] = transfer_config(given["transfer"], owner=owner)
    given["plan"] = plan_config(given["plan"], owner=owner)
    return StrategySettings(**given, owner=owner)


def documents_settings(strategy: Strategy) -> Strategy:
    """Insert the arguments of :class:`StrategySettings` into a class's docstring, before its own or its errors."""
    shared = _ARGUMENTS.search(StrategySettings.__doc__ or "")
    if shared is not None and strategy.__doc__ is not None:  # python -OO removes docstrings
        arguments = f"Args:\n{shared[1]}"
        own = "Args:\n" if "Args:\n" in strategy.__doc__ else "Raises:\n"
        merged = arguments if own == "Args:\n" else f"{arguments}\n    {own}"
        strategy.__doc__ = strategy.__doc__.replace(own, merged, 1)
    return strategy


def check_save_path(path: object) -> None:
    """Raise unless a path names a folder for a checkpoint. An empty path is the current folder; a URL is no folder."""
    if not isinstance(path, (str, os.PathLike)) or os.fspath(path) in ("", os.curdir) or "\0" in str(path):
        raise CheckpointError(
            f"{path!r} names no folder to save a checkpoint into.", "Pass a path such as 'last.ckpt'."
        )
    if not LOCAL_FOLDER.holds(path):
        raise CheckpointError(
            f"{str(path)!r} is a URL, and a checkpoint is a local folder.",
            "Pass a local path, also as ModelCheckpoint(dirpath=...), and copy the folder to the URL after training.",
        )


def nvme_path_of(zero: Mapping[str, Any] | None, *, owner: str) -> Path | None:
    """Return the folder for parameters from ``zero={"offload_param": {"nvme_path": ...}}``, or None if not set.

    Args:
        zero: The setting ``zero``.
        owner: Class to which it was passed, for errors.

    Raises:
        ConfigError: The path cannot be a folder's.
    """
    offload = {} if zero is None else zero.get("offload_param")
    path = offload.get("nvme_path") if isinstance(offload, Mapping) else None
    setting = f"{owner}(zero={{'offload_param': {{'nvme_path': {path!r}}}}})"
    return None if path is None else resolved_folder(str(path), setting=setting, has_variables=True)


def is_16_bit(config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed's configuration enables bf16 or fp16 parameters."""
    return any(config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))


def data_types(transfer: TransferConfig, *, accumulates: bool) -> dict[str, str]:
    """Return the section of DeepSpeed's configuration that sets the dtype in which gradients are accumulated.

    Args:
        transfer: The settings.
        accumulates: Whether a step may have several micro-batches; False keeps gradients in the parameters' dtype.
    """
    return {"grad_accum_dtype": "fp32"} if accumulates and transfer.accumulate_in == "fp32" else {}


def gradients_are_16_bit(config: Mapping[str, Any]) -> bool:
    """Return whether gradients have the parameters' 16-bit dtype, and are not accumulated in fp32."""
    return is_16_bit(config) and config.get("data_types", {}).get("grad_accum_dtype") != "fp32"
