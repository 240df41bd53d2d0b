"""Error messages for options of SmartInfinityTraining that are not its settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields

from lightning_smartinfinity.integrations.stock_options import refuse_unknown
from lightning_smartinfinity.settings.rules import shown

__all__ = ["refuse_options"]

_PRECISION = "Pass TrainingArguments(bf16=True) or (fp16=True), or Accelerator(mixed_precision=...)."
_LOSS_SCALE = "Leave it out: with TrainingArguments(fp16=True) DeepSpeed finds the scale of the loss itself."
_PROCESSES = (
    "Leave it out: torchrun or accelerate launch starts a process for each GPU, which CUDA_VISIBLE_DEVICES names."
)
# Answers that differ from those for Lightning's strategies in integrations/stock_options.py.
_ANSWERS = {
    "accelerator": "Leave it out: the training runs on GPUs where there are any, otherwise on the CPU.",
    "cluster_environment": _PROCESSES,
    "config": "Pass its section zero_optimization, without stage and offload_optimizer, as zero={...}. The rest are "
    "TrainingArguments: bf16, max_grad_norm, gradient_accumulation_steps, per_device_train_batch_size.",
    "deepspeed": "Pass TrainingArguments(deepspeed=training.config) within the context of this training.",
    "devices": _PROCESSES,
    "exclude_frozen_parameters": "Leave it out: checkpoints of adapters hold the adapters alone.",
    "hysteresis": _LOSS_SCALE,
    "initial_scale_power": _LOSS_SCALE,
    "load_full_weights": "Leave it out: from_pretrained loads whole weights, and partitions them.",
    "loss_scale": _LOSS_SCALE,
    "loss_scale_window": _LOSS_SCALE,
    "min_loss_scale": _LOSS_SCALE,
    "parallel_devices": _PROCESSES,
    "precision": _PRECISION,
    "precision_plugin": _PRECISION,
    "process_group_backend": "Leave it out: processes on GPUs talk through NCCL.",
    "remote_device": "Leave it out: from_pretrained partitions a model as it is loaded, and "
    "zero={'offload_param': {'device': 'cpu'}}, or 'nvme', says where the partitions lie.",
    "timeout": "Pass TrainingArguments(ddp_timeout=...), in seconds, for processes that wait for each other, or "
    "smartssd={'timeout': ...} for cards.",
}
# Names in Lightning or DeepSpeed of fields of TrainingArguments.
_RENAMED = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "default_root_dir": "output_dir",
    "gradient_clip_val": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
}


def refuse_options(owner: str, options: Mapping[str, object]) -> None:
    """Raise an error for options that are not settings.

    Args:
        owner: Name of the class that received them.
        options: The options; may be empty.

    Raises:
        ConfigError: There are options; the message names the right place of each.
    """
    if options:
        refuse_unknown(owner, options, answers={**_of_arguments(options), **_ANSWERS})


def _of_arguments(options: Mapping[str, object]) -> dict[str, str]:
    """Return answers for the options that are fields of TrainingArguments, under their own or another name."""
    try:
        arguments = {field.name for field in fields(importlib.import_module("transformers").TrainingArguments)}
    except ImportError:  # entering the context raises an error about the missing package
        arguments = set(_RENAMED.values())
    meant = {name: _RENAMED.get(name, name) for name in options}
    return {
        name: f"Pass TrainingArguments({argument}={shown(options[name])})."
        for name, argument in meant.items()
        if argument in arguments
    }
