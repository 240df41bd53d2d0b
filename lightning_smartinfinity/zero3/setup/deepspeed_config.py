"""Builds DeepSpeed's configuration from this package's settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.settings.options import check_keys
from lightning_smartinfinity.settings.rules import STRATEGY, as_passed
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig

__all__ = ["FOLLOWS_FROM_BUDGET", "build_deepspeed_config"]

# DeepSpeed allocates one bucket of this many elements; Lightning's default of 200M takes 400 MB before the first step.
_BUCKET_NUMEL = 16 * 1024 * 1024

_LEAST_ITEM_BYTES = 2  # smallest size of a parameter's element
_SHARE_AHEAD = 4  # one part in this many of the budget is prefetched at a time
FOLLOWS_FROM_BUDGET = {
    "allgather_sequential",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
}
"""Keys of ``zero`` (without ``stage3_``) and of its ``offload_param`` that are derived from a parameter budget."""


def build_deepspeed_config(
    zero: Mapping[str, object] | None, *, parameter_bytes: int | str = "auto", owner: str = STRATEGY
) -> DeepSpeedConfig:
    """Build DeepSpeed's configuration for ZeRO-3, with optimizer state left to this package.

    Args:
        zero: Additional keys of DeepSpeed's ``zero_optimization`` section.
        parameter_bytes: ``TransferConfig.parameter_bytes``.
        owner: Class that they were passed to, for errors.

    Returns:
        A configuration without batch size, precision, clipping and accumulation, which Lightning fills in.

    Raises:
        ConfigError: A key is unknown, or set by the strategy or by ``parameter_bytes``.
        UnsupportedError: A key switches on a feature that the strategy refuses.
    """
    user = _copied(zero, owner=owner) if zero else {}
    check_keys(user, owner=owner)
    section: DeepSpeedConfig = {
        "stage": 3,
        # "cpu" is DeepSpeed's simplest branch: no swapper, and the ordinary checkpoint files. The optimizer subclass
        # keeps it from allocating memory for state.
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "reduce_bucket_size": _BUCKET_NUMEL,
        "sub_group_size": 2 * _BUCKET_NUMEL,
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
    section.update(user)
    if "max_reuse_distance" not in section:
        # DeepSpeed's default keeps a parameter gathered if it is used again within a billion elements. To find out, the
        # second step walks the rest of the trace for every module, so its time grows with the square of their number.
        # Even with 0, parameters used again within stage3_prefetch_bucket_size stay gathered.
        section.setdefault("stage3_max_reuse_distance", 0)
    if not isinstance(parameter_bytes, str):
        _follow_budget(section, user, parameter_bytes)
    _complete_nvme(section)
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": section,
    }


def _follow_budget(section: DeepSpeedConfig, user: Mapping[str, object], nbytes: int) -> None:
    """Derive DeepSpeed's limits in elements from a budget in bytes, which ``zero3.parameters`` enforces exactly."""
    budget = f"TransferConfig(parameter_bytes={nbytes})"
    offload = user.get("offload_param")
    if not (isinstance(offload, Mapping) and offload.get("device") == "nvme"):
        raise ConfigError(
            f"{budget} needs parameters on storage.",
            "Pass zero={'offload_param': {'device': 'nvme'}}, or leave it out.",
        )
    set_too = [f"zero={{{key!r}: ...}}" for key in user if key.removeprefix("stage3_") in FOLLOWS_FROM_BUDGET]
    set_too += [f"zero={{'offload_param': {{{key!r}: ...}}}}" for key in offload if key in FOLLOWS_FROM_BUDGET]
    if set_too:
        raise ConfigError(f"{set_too[0]} follows from {budget}, and cannot be set as well.", "Leave one of them out.")
    section["stage3_param_persistence_threshold"] = 0
    section["stage3_max_live_parameters"] = max(1, nbytes // _LEAST_ITEM_BYTES)
    # Parameters gathered together would briefly be in memory twice.
    section["stage3_allgather_sequential"] = True
    section["stage3_prefetch_bucket_size"] = max(1, nbytes // _LEAST_ITEM_BYTES // _SHARE_AHEAD)


def _complete_nvme(section: DeepSpeedConfig) -> None:
    """Add keys that parameters on storage need in addition to ``{"device": "nvme"}``, unless the user set them."""
    offload = section.get("offload_param")
    if not isinstance(offload, dict) or offload.get("device") != "nvme":
        return
    # DeepSpeed's default keeps a billion elements in memory.
    offload.setdefault("max_in_cpu", 0)
    # DeepSpeed requires a path for its own files, but writes none.
    offload.setdefault("nvme_path", "unused")


def _copied(zero: Mapping[str, object], *, owner: str) -> DeepSpeedConfig:
    try:
        return dict(copy.deepcopy(zero))
    except TypeError as error:
        raise ConfigError(
            f"{as_passed(owner, 'zero', zero)} cannot be copied: {error}.", "Pass plain values."
        ) from error
