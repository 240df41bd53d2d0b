"""Checks which keys of DeepSpeed's ``zero_optimization`` section a user may set, and raises errors for all others.

DeepSpeed would also refuse unknown keys, but only when a fit begins: it cannot be imported before the accelerator is
chosen. So the keys are listed here, and a test compares them with those of the installed version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_smartinfinity.errors import ConfigError, SmartInfinityError, UnsupportedError
from lightning_smartinfinity.settings.rules import as_passed, shown
from lightning_smartinfinity.settings.wrong_names import closest, did_you_mean
from lightning_smartinfinity.settings.zero_keys import ZERO_KEYS

__all__ = ["check_keys"]


@dataclass(frozen=True)
class _Answer:
    """The error for a key that is not accepted.

    Args:
        fault: The fault of the key, as the end of a sentence.
        remedy: What the user can do about it.
        error: Class of the error.
    """

    fault: str
    remedy: str
    error: type[SmartInfinityError] = ConfigError


_STATE_ON_STORAGE = _Answer(
    "cannot be set, because optimizer state lies on storage",
    "Leave it out: storage=... names the folders, and transfer={'dram_cache_bytes': 'auto'} keeps in host memory what "
    "fits.",
)
_ON_CPU = "Write zero={'offload_param': {'device': 'cpu'}} for parameters; optimizer state lies on storage."
_OLD_NAME = "is an old name of DeepSpeed's"
_BESIDE = _Answer(
    "belongs beside the section in DeepSpeed's configuration",
    "Leave it out: batch size, precision, clipping and accumulation are those of Trainer, Fabric or TrainingArguments.",
)

_FEATURES: dict[str, tuple[str, tuple[object, ...]]] = {
    # Key, feature, and the values that do not switch it on.
    "zenflow": ("ZenFlow", (None,)),
    "super_offload": ("SuperOffload", ()),
    "mics_shard_size": ("MiCS", ()),
    "mics_hierarchical_params_gather": ("MiCS", ()),
    "zero_hpz_partition_size": ("hpZ", (0, 1)),
    "zero_quantized_weights": ("quantized weights", (False,)),
    "zero_quantized_nontrainable_weights": ("quantized weights", (False,)),
    "zero_quantized_gradients": ("quantized gradients", (False,)),
    "load_from_fp32_weights": ("load_from_fp32_weights=False", (True,)),
    "elastic_checkpoint": ("elastic checkpoints", (False,)),
}

_ANSWERS = {
    "stage": _Answer("cannot be set, because training is always in ZeRO stage 3", "Leave it out."),
    "offload_optimizer": _STATE_ON_STORAGE,
    "cpu_offload": _STATE_ON_STORAGE,
    # DeepSpeed still accepts these old names, and would silently move them into another section.
    "cpu_offload_param": _Answer(_OLD_NAME, _ON_CPU),
    "cpu_offload_use_pin_memory": _Answer(
        _OLD_NAME, "Write zero={'offload_param': {'device': 'cpu', 'pin_memory': True}}."
    ),
    "stage3_gather_fp16_weights_on_model_save": _Answer(
        _OLD_NAME, "Write zero={'stage3_gather_16bit_weights_on_model_save': True}."
    ),
    "optimizer": _Answer(
        "belongs beside the section in DeepSpeed's configuration",
        "Leave it out: the optimizer is your program's, and its state lies in the folders of storage=...",
    ),
    **dict.fromkeys(
        (
            "activation_checkpointing",
            "aio",
            "bf16",
            "fp16",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "scheduler",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
        ),
        _BESIDE,
    ),
    **{
        key: _Answer(f"asks for {feature}: that does not work here", "Leave it out.", UnsupportedError)
        for key, (feature, _) in _FEATURES.items()
    },
}

_SECTIONS = {
    "leaf_module": ("classes", "name_suffixes", "names"),
    "offload_param": ("buffer_count", "buffer_size", "device", "max_in_cpu", "nvme_path", "pin_memory"),
}
_INSIDE = {key: f"zero={{{section!r}: {{{key!r}: ...}}}}" for section, keys in _SECTIONS.items() for key in keys}


def check_keys(zero: Mapping[str, object], *, owner: str) -> None:
    """Refuse keys that are unknown, old, set by the strategy, or of features that the strategy does not support.

    DeepSpeed checks the values later.

    Args:
        zero: The user's ``zero`` argument.
        owner: Class that it was passed to, for errors.

    Raises:
        ConfigError: A key is unknown, old, or set by the strategy; the message names the alternative.
        UnsupportedError: A key switches on a feature that the strategy does not support.
    """
    for key, value in zero.items():
        given = as_passed(owner, "zero", {key: value})
        if not isinstance(key, str):
            raise ConfigError(f"{given} has a key that is no str.", f"Remove {key!r}.")
        if key == "zero_optimization":
            raise ConfigError(f"{given} is the whole section.", f"Pass what is inside of it{_kept(value)}.")
        if key in _SECTIONS:
            _check_section(key, value, owner=owner)
        elif key in _ANSWERS:
            if key not in _FEATURES or value not in _FEATURES[key][1]:
                raise _ANSWERS[key].error(f"{given} {_ANSWERS[key].fault}.", _ANSWERS[key].remedy)
        elif key not in ZERO_KEYS:
            raise _unknown(key, given)


def _check_section(section: str, value: object, *, owner: str) -> None:
    """Refuse an unknown key of a nested section, and a value that is no section."""
    given = as_passed(owner, "zero", {section: value})
    known = _SECTIONS[section]
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{given}: {section} is no dict.", f"Pass a dict with some of {', '.join(known)}.")
    for key in value or ():
        if key not in known:
            raise ConfigError(
                f"{given}: {section} has no key {key!r}.",
                f"{did_you_mean(str(key), known)}Its keys are {', '.join(known)}.",
            )


def _kept(section: object) -> str:
    """Return text with the keys of a whole section that can be set."""
    if not isinstance(section, Mapping):
        return " as zero={...}"
    return f": zero={shown({key: value for key, value in section.items() if key not in _ANSWERS})}"


def _unknown(key: str, given: str) -> SmartInfinityError:
    """Return the error for an unknown key: it names the closest key, or gives that key's own error."""
    fault = f"{given} is no key of DeepSpeed's zero_optimization section"
    close = closest(key, [*ZERO_KEYS, *_INSIDE, *_ANSWERS])
    if close and close[0] in _ANSWERS:
        answer = _ANSWERS[close[0]]
        return answer.error(f"{fault}, and {close[0]!r} {answer.fault}.", answer.remedy)
    meant = did_you_mean(key, [*ZERO_KEYS, *_INSIDE], written=_INSIDE)
    return ConfigError(f"{fault}.", f"{meant}Use the keys of that section.")
