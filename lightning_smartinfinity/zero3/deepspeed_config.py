"""Builds DeepSpeed's configuration from ours."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig

__all__ = ["build_deepspeed_config"]

# DeepSpeed allocates one bucket of this many elements; Lightning's default of 200M takes 400 MB before the first step.
_BUCKET_NUMEL = 16 * 1024 * 1024

_OWNED = {
    "stage": "this strategy is ZeRO stage 3",
    "offload_optimizer": "optimizer state lives on the strategy's storage",
    "cpu_offload": "optimizer state lives on the strategy's storage",
}
# Old names that DeepSpeed still accepts, and would silently move into another section.
_DEPRECATED = {
    "cpu_offload_param": "Use zero={'offload_param': {'device': 'cpu'}}.",
    "cpu_offload_use_pin_memory": "Use zero={'offload_param': {'device': 'cpu', 'pin_memory': True}}.",
}
_REFUSED = {
    "zenflow": "ZenFlow",
    "super_offload": "SuperOffload",
    "mics_shard_size": "MiCS",
    "mics_hierarchical_params_gather": "MiCS",
    "zero_hpz_partition_size": "hpZ",
    "zero_quantized_weights": "quantized weights",
    "zero_quantized_nontrainable_weights": "quantized weights",
    "zero_quantized_gradients": "quantized gradients",
    "load_from_fp32_weights": "load_from_fp32_weights",
    "elastic_checkpoint": "elastic checkpoints",
}
# Values of the refused keys that switch nothing on.
_HARMLESS: tuple[object, ...] = (None, False, 0)
_HARMLESS_OF: dict[str, tuple[object, ...]] = {
    "zero_hpz_partition_size": (None, 0, 1),
    "mics_shard_size": (None, 0, -1),
    "load_from_fp32_weights": (None, True),  # False switches this feature on
}


def build_deepspeed_config(zero: Mapping[str, object] | None) -> DeepSpeedConfig:
    """Build DeepSpeed's configuration for ZeRO-3, with optimizer state left to this package.

    Args:
        zero: Additional keys of DeepSpeed's ``zero_optimization`` section.

    Returns:
        A configuration without batch size, precision, clipping and accumulation, which Lightning fills in.

    Raises:
        ConfigError: A key is unknown or decided by the strategy.
        UnsupportedError: A key switches on a feature that the strategy refuses.
    """
    user = _copied(zero) if zero else {}
    _check(user)
    section: DeepSpeedConfig = {
        "stage": 3,
        # "cpu" is the branch of DeepSpeed with the fewest side paths: no swapper, the ordinary checkpoint files.
        # The optimizer subclass prevents it from allocating memory for state.
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "reduce_bucket_size": _BUCKET_NUMEL,
        "sub_group_size": 2 * _BUCKET_NUMEL,
        "contiguous_gradients": True,
        "overlap_comm": False,
    }
    section.update(user)
    if "max_reuse_distance" not in section:
        # DeepSpeed's default keeps a parameter gathered if it is used again within a billion elements. To find out, the
        # second step walks the rest of the trace for every module: time grows with the square of their number. What is
        # used again within stage3_prefetch_bucket_size stays gathered all the same.
        section.setdefault("stage3_max_reuse_distance", 0)
    _complete_nvme(section)
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": section,
    }


def _complete_nvme(section: DeepSpeedConfig) -> None:
    """Add what parameters on storage need beside ``{"device": "nvme"}``, unless the user has set it."""
    offload = section.get("offload_param")
    if not isinstance(offload, dict) or offload.get("device") != "nvme":
        return
    # DeepSpeed's default keeps a billion elements in memory.
    offload.setdefault("max_in_cpu", 0)
    # DeepSpeed requires a path for its own files, but writes none.
    offload.setdefault("nvme_path", "unused")


def _copied(zero: Mapping[str, object]) -> DeepSpeedConfig:
    try:
        return dict(copy.deepcopy(zero))
    except TypeError as error:
        raise ConfigError(f"zero={zero!r} cannot be copied: {error}.", "Pass plain values.") from error


def _check(user: Mapping[str, object]) -> None:
    for key, value in user.items():
        if not isinstance(key, str):
            raise ConfigError(f"zero={{{key!r}: {value!r}}} has a key that is no str.", f"Remove {key!r}.")
        if key in _OWNED:
            raise ConfigError(f"zero={{{key!r}: {value!r}}} cannot be set: {_OWNED[key]}.", f"Remove {key!r}.")
        if key in _DEPRECATED:
            raise ConfigError(f"zero={{{key!r}: {value!r}}} is an old name of DeepSpeed's.", _DEPRECATED[key])
        if key in _REFUSED and value not in _HARMLESS_OF.get(key, _HARMLESS):
            raise UnsupportedError(
                f"zero={{{key!r}: {value!r}}}: {_REFUSED[key]} does not work with the smart_infinity strategy.",
                f"Remove {key!r}.",
            )
