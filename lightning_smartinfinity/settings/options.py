"""Lists the options that users know from Lightning, transformers and DeepSpeed, and what to write instead of them.

DeepSpeed would also refuse unknown keys of its configuration, but only when a fit begins: it cannot be imported before
the accelerator is chosen. So its keys are listed here, and a test compares them with those of the installed version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from string import Template
from typing import NamedTuple, TypeVar

from lightning_smartinfinity.errors import ConfigError, SmartInfinityError, UnsupportedError
from lightning_smartinfinity.settings import SmartSSDConfig, TransferConfig
from lightning_smartinfinity.settings.rules import as_passed, shown
from lightning_smartinfinity.settings.strategy import StrategySettings
from lightning_smartinfinity.settings.wrong_names import closest, did_you_mean

Row = TypeVar("Row")

__all__ = ["ACCEPTED", "OF_FABRIC", "OF_TRAINER", "OF_TRANSFORMERS", "REFUSED_KEYS", "check_keys", "refuse_unknown"]


class _Refusal(NamedTuple):
    """The error for a key of ``zero``.

    Args:
        fault: The fault of the key, as the end of a sentence.
        remedy: What the user can do about it.
        harmless: Values that are accepted, because they do not switch a feature on.
        error: Class of the error.
    """

    fault: str
    remedy: str
    harmless: tuple[object, ...] = ()
    error: type[SmartInfinityError] = ConfigError


_ZERO_KEYS = """
allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients
enable_sanity_checks gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1
log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear model_persistence_threshold
module_granularity_threshold offload_param overlap_comm override_module_apply param_persistence_threshold
parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size reduce_scatter
round_robin_gradients save_muon_momentum_buffer_in_memory stage3_allgather_sequential
stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size use_all_reduce_for_fetch_params
use_multi_rank_bucket_allreduce
"""
ACCEPTED = {
    "constructor": [field.name for field in fields(StrategySettings)],
    "transfer": [field.name for field in fields(TransferConfig)],
    "smartssd": [field.name for field in fields(SmartSSDConfig)],
    "zero": _ZERO_KEYS.split(),
    "leaf_module": ["classes", "name_suffixes", "names"],
    "offload_param": ["buffer_count", "buffer_size", "device", "max_in_cpu", "nvme_path", "pin_memory"],
}
"""Accepted options by place: all three constructors, their dicts, and the dicts inside of ``zero``."""

_STATE = (
    "Leave it out: optimizer state is always in the folders of storage=..., and by default host memory keeps what fits."
)
_CHECKPOINTING = "Call deepspeed.checkpointing.configure(None, {}=True) before you use deepspeed.checkpointing."
_OFFLOAD_PARAM = "Pass zero={{'offload_param': {{'device': {!r}, {!r}: $value}}}}."
_CONFIG = "Pass its section zero_optimization, without stage and offload_optimizer, as zero={...}."
_CARDS = "or the cards of storage folders as smartssd={'devices': [...]}."
_PARTITIONED = "and zero={'offload_param': {'device': 'cpu'}}, or 'nvme', says where the partitions are stored."


def _by_name(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return a table with a row for each name; in the given one, names are separated by blanks."""
    return {name: row for names, row in rows.items() for name in names.split()}


_ANYWHERE = {
    "block_size": "Pass transfer={'tasklet_bytes': '4MiB'}: the most that is read or written at once.",
    "contiguous_memory_optimization": _CHECKPOINTING.format("contiguous_checkpointing"),
    "cpu_checkpointing": _CHECKPOINTING.format("checkpoint_in_cpu"),
    "cpu_offload offload_optimizer offload_optimizer_device": _STATE,
    "logging_batch_size_per_gpu": "Leave it out: DeepSpeed only prints it.",
    "logging_level": "Call logging.getLogger('DeepSpeed').setLevel(...).",
    "max_in_cpu": _OFFLOAD_PARAM.format("nvme", "max_in_cpu"),
    "nvme_path": "Pass storage=$value; parameters go there with zero={'offload_param': {'device': 'nvme'}}.",
    "offload_parameters": "Pass zero={'offload_param': {'device': 'cpu'}} for host memory, or 'nvme' for storage.",
    "offload_params_device": "Pass zero={'offload_param': {'device': $value}}.",
    "optimizer_buffer_count": "Pass transfer={'num_buffers': 16}: the buffers of the ring, for models of any size.",
    "overlap_events queue_depth single_submit thread_count": "Leave it out: the I/O engine keeps a request for "
    "each ring buffer in progress; transfer={'num_buffers': 32} makes more.",
    "params_buffer_count": _OFFLOAD_PARAM.format("nvme", "buffer_count"),
    "params_buffer_size": _OFFLOAD_PARAM.format("nvme", "buffer_size"),
    "partition_activations": _CHECKPOINTING.format("partition_activations"),
    "pin_memory": _OFFLOAD_PARAM.format("cpu", "pin_memory"),
    "stage zero_optimization": "Leave it out: training is always in ZeRO stage 3.",
    "synchronize_checkpoint_boundary": _CHECKPOINTING.format("synchronize"),
    "zero_allow_untested_optimizer": "Leave it out: optimizers are updated by rules of our own, and one without a "
    "rule is refused by name.",
}
_TRAINER = _ANYWHERE | {
    "bf16 fp16 precision precision_plugin": "Pass Trainer(precision=...) by name.",
    "ckpt_path resume resume_from_checkpoint": "Pass Trainer.fit(..., ckpt_path='storage-or-new'), or a path.",
    "config": f"{_CONFIG} The Trainer sets the rest: precision, gradient clipping and accumulation.",
    "devices": f"Pass Trainer(devices=...), {_CARDS}",
    "remote_device": f"Leave it out: what configure_model builds is partitioned at once, {_PARTITIONED}",
}
_FABRIC = _ANYWHERE | {
    "bf16 fp16 precision precision_plugin": "Pass Fabric(precision=...) by name.",
    "ckpt_path resume resume_from_checkpoint": "Call fabric.strategy.resume('storage-or-new') before fabric.setup, and "
    "fabric.load('storage-or-new', state) after it.",
    "config": f"{_CONFIG} Pass Fabric(precision=...); gradient clipping and accumulation are your loop's.",
    "devices": f"Pass Fabric(devices=...), {_CARDS}",
    "remote_device": f"Leave it out: what is built in fabric.init_module() is partitioned at once, {_PARTITIONED}",
}
_TRANSFORMERS = _ANYWHERE | {
    "accelerator": "Leave it out: the training runs on GPUs where there are any, otherwise on the CPU.",
    "accumulate_grad_batches": "Pass TrainingArguments(gradient_accumulation_steps=$value).",
    "ckpt_path resume resume_from_checkpoint": "Call Trainer.train(resume_from_checkpoint=$value).",
    "cluster_environment devices parallel_devices": "Leave it out: torchrun or accelerate launch starts a process "
    "for each GPU, which CUDA_VISIBLE_DEVICES names.",
    "config": f"{_CONFIG} The rest are TrainingArguments: bf16, max_grad_norm, gradient_accumulation_steps, "
    "per_device_train_batch_size.",
    "deepspeed": "Pass TrainingArguments(deepspeed=training.config) within the context of this training.",
    "default_root_dir": "Pass TrainingArguments(output_dir=$value).",
    "exclude_frozen_parameters": "Leave it out: checkpoints of adapters hold the adapters alone.",
    "gradient_clip_val gradient_clipping": "Pass TrainingArguments(max_grad_norm=$value).",
    "hysteresis initial_scale_power loss_scale loss_scale_window min_loss_scale": "Leave it out: with "
    "TrainingArguments(fp16=True) DeepSpeed finds the scale of the loss itself.",
    "load_full_weights": "Leave it out: from_pretrained loads whole weights, and partitions them.",
    "precision precision_plugin": "Pass TrainingArguments(bf16=True) or (fp16=True), or "
    "Accelerator(mixed_precision=...).",
    "process_group_backend": "Leave it out: processes on GPUs talk through NCCL.",
    "remote_device": f"Leave it out: from_pretrained partitions a model as it is loaded, {_PARTITIONED}",
    "timeout": "Pass TrainingArguments(ddp_timeout=...), in seconds, for processes that wait for each other, or "
    "smartssd={'timeout': ...} for cards.",
    "train_micro_batch_size_per_gpu": "Pass TrainingArguments(per_device_train_batch_size=$value).",
}
OF_TRAINER, OF_FABRIC, OF_TRANSFORMERS = map(_by_name, (_TRAINER, _FABRIC, _TRANSFORMERS))
"""Remedies by option: a sentence that says what to write instead; ``$value`` is the value of the option."""


def _feature(feature: str, *harmless: object) -> _Refusal:
    return _Refusal(f"asks for {feature}: that does not work here", "Leave it out.", harmless, UnsupportedError)


_OLD_NAME = "is an old name of DeepSpeed's"
_OUTSIDE = "belongs outside of this section in DeepSpeed's configuration"
_KEYS = {
    "stage": _Refusal("cannot be set, because training is always in ZeRO stage 3", "Leave it out."),
    "cpu_offload offload_optimizer": _Refusal(
        "cannot be set, because optimizer state is on storage",
        "Leave it out: storage=... names the folders, and by default host memory keeps what fits.",
    ),
    # DeepSpeed still accepts these old names, and would silently move them into another section.
    "cpu_offload_param": _Refusal(
        _OLD_NAME,
        "Write zero={'offload_param': {'device': 'cpu'}} for parameters; optimizer state is on storage.",
    ),
    "cpu_offload_use_pin_memory": _Refusal(
        _OLD_NAME, "Write zero={'offload_param': {'device': 'cpu', 'pin_memory': True}}."
    ),
    "stage3_gather_fp16_weights_on_model_save": _Refusal(
        _OLD_NAME, "Write zero={'stage3_gather_16bit_weights_on_model_save': True}."
    ),
    "optimizer": _Refusal(
        _OUTSIDE, "Leave it out: the optimizer is your program's, and its state is in the folders of storage=..."
    ),
    "activation_checkpointing aio bf16 fp16 gradient_accumulation_steps gradient_clipping scheduler "
    "train_batch_size train_micro_batch_size_per_gpu": _Refusal(
        _OUTSIDE,
        "Leave it out: batch size, precision, clipping and accumulation are those of Trainer, Fabric or "
        "TrainingArguments.",
    ),
    "zenflow": _feature("ZenFlow", None),
    "super_offload": _feature("SuperOffload"),
    "mics_shard_size mics_hierarchical_params_gather": _feature("MiCS"),
    "zero_hpz_partition_size": _feature("hpZ", 0, 1),
    "zero_quantized_weights zero_quantized_nontrainable_weights": _feature("quantized weights", False),
    "zero_quantized_gradients": _feature("quantized gradients", False),
    "load_from_fp32_weights": _feature("load_from_fp32_weights=False", True),
    "elastic_checkpoint": _feature("elastic checkpoints", False),
}
REFUSED_KEYS = _by_name(_KEYS)
"""Keys of DeepSpeed's configuration that ``zero`` refuses."""

_DICT_OF = {name: place for place in ("transfer", "smartssd", "zero") for name in ACCEPTED[place]}
_DICTS_IN_ZERO = ("leaf_module", "offload_param")


def refuse_unknown(
    owner: str, options: Mapping[str, object], *, remedies: Mapping[str, str], known: Iterable[str] = ()
) -> None:
    """Raise an error for options that a constructor does not have.

    Args:
        owner: Class name, for the message.
        options: Options that the user passed in addition to the settings of a strategy.
        remedies: What to write instead of an option, such as :data:`OF_TRAINER`.
        known: Options that the class has in addition to those settings.

    Raises:
        ConfigError: An option is unknown; the message names all unknown ones and their remedies.
    """
    unknown = sorted(options.keys() - set(known))
    if unknown:
        several = dict.fromkeys(_remedy(name, options[name], remedies=remedies, known=known) for name in unknown)
        raise ConfigError(f"{owner} has no setting {', '.join(map(repr, unknown))}.", " ".join(several))


def _remedy(name: str, value: object, *, remedies: Mapping[str, str], known: Iterable[str] = ()) -> str:
    """Return a sentence that says what to write instead of an option; the arguments are those of the caller."""
    if name == "zero_optimization" and isinstance(value, Mapping):
        return "Pass what is inside of it as zero={...}, without stage and offload_optimizer."
    if name in remedies:
        return Template(remedies[name]).substitute(value=shown(value))
    if name in _DICT_OF:
        return f"Pass {_DICT_OF[name]}={{{name!r}: {shown(value)}}}."
    own = {*ACCEPTED["constructor"], *known}
    close = closest(name, [*ACCEPTED["constructor"], *known, *_DICT_OF, *remedies])
    if close and close[0] in remedies.keys() - own:
        return f"Did you mean {close[0]!r}? {_remedy(close[0], value, remedies=remedies)}"
    written = {each: f"{place}={{{each!r}: ...}}" for each, place in _DICT_OF.items()}
    section = "Settings of ZeRO-3 go into zero={...}, settings of the transfer into transfer={...}."
    return f"{did_you_mean(name, [*own, *_DICT_OF], written=written)}{section}"


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
            raise ConfigError(f"{given} is the whole section.", f"Pass what is inside of it{_accepted_in(value)}.")
        refusal = REFUSED_KEYS.get(key)
        if refusal is not None and value not in refusal.harmless:
            raise refusal.error(f"{given} {refusal.fault}.", refusal.remedy)
        if key in _DICTS_IN_ZERO:
            _check_dict(key, value, given)
        elif refusal is None and key not in ACCEPTED["zero"]:
            raise _unknown_key(key, given)


def _check_dict(place: str, value: object, given: str) -> None:
    """Refuse an unknown key of a dict inside of ``zero``, and a value that is no dict."""
    known = ACCEPTED[place]
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{given}: {place} is no dict.", f"Pass a dict with some of {', '.join(known)}.")
    for key in value or ():
        if key not in known:
            remedy = f"{did_you_mean(str(key), known)}Its keys are {', '.join(known)}."
            raise ConfigError(f"{given}: {place} has no key {key!r}.", remedy)


def _accepted_in(section: object) -> str:
    """Return text with the keys of a whole section that can be set."""
    if not isinstance(section, Mapping):
        return " as zero={...}"
    return f": zero={shown({key: value for key, value in section.items() if key not in REFUSED_KEYS})}"


def _unknown_key(key: str, given: str) -> SmartInfinityError:
    """Return the error for an unknown key: it names the closest key, or gives that key's own error."""
    fault = f"{given} is no key of DeepSpeed's zero_optimization section"
    written = {name: f"zero={{{place!r}: {{{name!r}: ...}}}}" for place in _DICTS_IN_ZERO for name in ACCEPTED[place]}
    accepted = [*ACCEPTED["zero"], *written]
    close = closest(key, [*accepted, *REFUSED_KEYS])
    if close and close[0] in REFUSED_KEYS:
        refusal = REFUSED_KEYS[close[0]]
        return refusal.error(f"{fault}, and {close[0]!r} {refusal.fault}.", refusal.remedy)
    return ConfigError(f"{fault}.", f"{did_you_mean(key, accepted, written=written)}Use the keys of that section.")
