"""The settings that a user gives to a strategy: one frozen object, checked once, and one text that documents them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
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
    smartssd_config,
    storage_folders,
    transfer_config,
)
from lightning_smartinfinity.settings.rules import (
    STRATEGY,
    Rule,
    among,
    as_passed,
    instance,
    number,
    one_of,
    optional,
    require,
)

__all__ = [
    "StrategySettings",
    "check_save_path",
    "documents_settings",
    "given_settings",
    "data_types",
    "gradients_are_16_bit",
    "is_16_bit",
    "nvme_path_of",
]

_CHOICES = {
    "update_device": ("auto", "host", "smartssd"),
    "state_format": tuple(STATE_FORMATS),
    "overlap": ("auto", "none", "forward", "backward"),
}


def _seconds_or_none(most: int) -> Rule:
    seconds = number(1, most)  # less would be missed on a busy machine
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
    """Settings that a user gives to a strategy.

    Args:
        storage: Folder, or list with a folder per storage device. Default: ``smart_infinity`` below the Trainer's
            ``default_root_dir`` or ``output_dir``, or below the current folder with Fabric and Accelerate.
        update_device: Where the update runs: ``"host"`` (CPU), ``"smartssd"`` (the accelerators of SmartSSDs), or
            ``"auto"``: SmartSSDs if an xclbin for them is named and they can be used, otherwise the host.
        smartssd: Settings for SmartSSDs: xclbin, cards, route of gradients, timeout and binding of XRT, as a
            :class:`SmartSSDConfig` or a dict such as ``{"xclbin": "kernels.xclbin"}``.
        state_format: Format of optimizer state on storage: ``"fp32"`` (12 bytes per parameter), ``"bf16"`` (8),
            ``"int8"`` (6) or, with parameters in bf16, ``"int8_remainder"`` (6, of which a step reads 4). Optimizers
            other than Adam and AdamW have only ``"fp32"`` (4 bytes per array).
        overlap: Passes during which the update may run: ``"none"``, ``"forward"`` (the next step's), ``"backward"``
            (its own step's, and the next forward), or ``"auto"`` (the fastest of these in the first steps).
        compression: How gradients are sent to the update: :class:`TopK` sends the largest of them, :class:`BlockScaled`
            sends all in 8 bits, None sends them unchanged. It helps where they cross a channel, as with SmartSSDs.
        activations: How much of what forward saves for backward moves to storage, as an :class:`ActivationOffload` or
            a dict such as ``{"budget_bytes": "2GB"}``; ``{}`` stands for its defaults. None: all stays in memory.
        transfer: Ring size, I/O engine, state kept in host memory, durability, direct I/O, and name and lifetime of
            the files, as a :class:`TransferConfig` or a dict such as ``{"num_buffers": 8}``.
        zero: Further keys of DeepSpeed's ``zero_optimization`` section, such as ``reduce_bucket_size``.
        plan: ``"auto"`` lets memory be planned when a fit begins: where parameters lie, and the budgets of ``transfer``
            and ``zero`` that are left open, by the memory and the storage that are free. What was chosen is printed.
            A :class:`PlanConfig`, or a dict such as ``{"batch": 8, "seq": 2048}``, says more of the training. None
            leaves all at the defaults.
        watchdog_timeout: Seconds after which a rank whose process does not answer is lost, so that all ranks end. None
            or 0 for no watch over the ranks.
        collective_timeout: Seconds that a rank may take to join a gather, reduction or other collective for which the
            others wait, while it works on something else; then every rank raises :class:`RanksDivergedError`. Saves,
            loads, set-up and compilation may take longer. If all ranks wait, at different places, or have ended, they
            raise within 30 seconds. The default comes before torch's own limit of 30 minutes (Lightning's ``timeout``),
            whose error names no rank: for longer work on one rank raise both. Waits for a disk have a limit of their
            own (``TransferConfig(io_timeout=...)``). None or 0, or no watch over the ranks: torch's limit alone.

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
    owner: InitVar[str] = STRATEGY  # class that the user called, with which errors begin

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


def given_settings(
    owner: str, *, storage: object, smartssd: Any, activations: Any, transfer: Any, plan: Any, **others: Any
) -> StrategySettings:
    """Return the settings that a user gives to a class: folders of any form, other settings as objects or dicts.

    Args:
        owner: Name of the class, for errors.
        storage: Folder, or list of folders.
        smartssd: Settings for SmartSSDs, or a dict of them.
        activations: Settings for what forward saves, a dict of them, or None.
        transfer: Settings of the transfer, or a dict of them.
        plan: Settings of the plan, a dict of them, or ``"auto"``.
        **others: Settings that are kept as they are given.

    Raises:
        ConfigError: A setting is unknown, contradictory or out of range.
    """
    return StrategySettings(
        storage=storage_folders(storage, owner=owner),
        smartssd=smartssd_config(smartssd, owner=owner),
        activations=activation_offload(activations, owner=owner),
        transfer=transfer_config(transfer, owner=owner),
        plan=plan_config(plan, owner=owner),
        owner=owner,
        **others,
    )


def documents_settings(strategy: Strategy) -> Strategy:
    """Put the arguments of :class:`StrategySettings` before those in a class's own docstring, or before its errors."""
    shared = _ARGUMENTS.search(StrategySettings.__doc__ or "")
    if shared is not None and strategy.__doc__ is not None:  # python -OO removes docstrings
        arguments = f"Args:\n{shared[1]}"
        own = "Args:\n" if "Args:\n" in strategy.__doc__ else "Raises:\n"
        merged = arguments if own == "Args:\n" else f"{arguments}\n    {own}"
        strategy.__doc__ = strategy.__doc__.replace(own, merged, 1)
    return strategy


def check_save_path(path: object) -> None:
    """Refuse a path that names no folder for a checkpoint: an empty one means the current folder, a URL none."""
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
    """Return the folder that ``zero={"offload_param": {"nvme_path": ...}}`` names for parameters, or None.

    Args:
        zero: The setting ``zero``.
        owner: Class to which it was passed, for errors.

    Raises:
        ConfigError: The path cannot be that of a folder.
    """
    offload = {} if zero is None else zero.get("offload_param")
    path = offload.get("nvme_path") if isinstance(offload, Mapping) else None
    setting = f"{owner}(zero={{'offload_param': {{'nvme_path': {path!r}}}}})"
    return None if path is None else resolved_folder(str(path), setting=setting, has_variables=True)


def is_16_bit(config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed's configuration says that parameters are bf16 or fp16."""
    return any(config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16"))


def data_types(transfer: TransferConfig, *, accumulates: bool) -> dict[str, str]:
    """Return the section of DeepSpeed's configuration that says in which dtype gradients are added.

    Args:
        transfer: The settings.
        accumulates: Whether a step may have several micro-batches; if not, gradients keep the parameters' dtype.
    """
    return {"grad_accum_dtype": "fp32"} if accumulates and transfer.accumulate_in == "fp32" else {}


def gradients_are_16_bit(config: Mapping[str, Any]) -> bool:
    """Return whether gradients are kept in 16 bit, as the parameters, and not in fp32, in which several are added."""
    return is_16_bit(config) and config.get("data_types", {}).get("grad_accum_dtype") != "fp32"
