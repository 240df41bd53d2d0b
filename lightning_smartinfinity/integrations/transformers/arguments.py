"""Checks ``transformers.TrainingArguments`` before anything is allocated."""

from __future__ import annotations

import hashlib
import importlib
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lightning_smartinfinity.common.transformers_models import models_in
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.settings.options import OF_TRANSFORMERS

__all__ = [
    "Arguments",
    "argument_remedies",
    "check_arguments",
    "has_adapters",
    "has_rule",
    "job_of",
    "refuse_quantized",
]

Arguments: TypeAlias = Any
"""``transformers.TrainingArguments``; transformers is an optional dependency."""

_RULED = frozenset(name.lower() for rule in RULES for name in rule.optimizers)


def argument_remedies() -> dict[str, str]:
    """Return what to write instead of options of SmartInfinityTraining that do not exist."""
    try:
        arguments = [field.name for field in fields(importlib.import_module("transformers").TrainingArguments)]
    except ImportError:  # entering the context raises an error about the missing package
        arguments = []
    return {name: f"Pass TrainingArguments({name}=$value)." for name in arguments} | OF_TRANSFORMERS


def check_arguments(args: Arguments) -> None:
    """Refuse arguments that would disable DeepSpeed, search batch sizes, or keep the optimizer's state in memory.

    Raises:
        UnsupportedError: An argument is one of these.
    """
    if args.use_cpu:
        raise UnsupportedError(
            "TrainingArguments(use_cpu=True) switches DeepSpeed off, and the model would train in memory.",
            "Leave it out: without a GPU the training runs on the CPU all the same. There, leave bf16=True out, too: "
            "transformers trains in bf16 on GPUs only.",
        )
    if args.auto_find_batch_size:
        raise UnsupportedError(
            "TrainingArguments(auto_find_batch_size=True) does not work with ZeRO-3: it would build the engine and its "
            "storage anew for each batch size.",
            "Leave it out. Set per_device_train_batch_size to what fits, which `smart-infinity plan` estimates, and "
            "reach the size of a step by gradient_accumulation_steps.",
        )
    name = str(getattr(args.optim, "value", args.optim))
    if not has_rule(name):
        from transformers.training_args import OptimizerNames

        usable = [repr(each.value) for each in OptimizerNames if has_rule(each.value)]
        raise UnsupportedError(
            f"TrainingArguments(optim={name!r}) does not work with SmartInfinityTraining: no update rule is known "
            "for this optimizer, whose state would have to be on storage.",
            f"Use optim={' or '.join(usable)}; state_format='int8' makes the state on storage smaller.",
        )


def has_rule(name: str) -> bool:
    """Return whether transformers' name of an optimizer denotes one of torch.optim that has an update rule."""
    return name.removesuffix("_fused").removesuffix("_torch") in _RULED


def refuse_quantized(model: torch.nn.Module) -> None:
    """Refuse models with quantized weights, which ZeRO-3 cannot partition.

    Raises:
        UnsupportedError: A model of transformers in the module is quantized.
    """
    for name, each in models_in(model).items():
        if getattr(each, "is_quantized", False) or getattr(each, "hf_quantizer", None) is not None:
            raise UnsupportedError(
                f"{type(each).__name__} {name!r} has quantized weights (4 or 8 bits), which ZeRO-3 cannot partition.",
                "Load it without quantization_config; its weights may be on storage instead: "
                "SmartInfinityTraining(zero={'offload_param': {'device': 'nvme'}}).",
            )


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether a model of transformers got adapters from its own ``add_adapter``."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def job_of(output_dir: str | Path) -> str:
    """Return a job name for an output folder, so that several trainings can share a storage folder."""
    path = os.path.realpath(output_dir)
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    name = os.fsencode(os.path.basename(path)).decode(errors="replace")  # a job's name is text, a path any bytes
    return f"{name or 'root'}-{digest}"
