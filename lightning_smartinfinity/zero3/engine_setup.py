"""Builds engines by ``deepspeed.initialize``, and refuses modules that another engine is training."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deepspeed
import torch

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.patches import replaced
from lightning_smartinfinity.zero3.engine import EvaluationEngine, SmartInfinityEngine
from lightning_smartinfinity.zero3.release import release_module, trainings_of
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig
from lightning_smartinfinity.zero3.validation import check_dtype, check_layers, check_process_groups

__all__ = [
    "build_evaluation_engine",
    "engine_with",
    "evaluation_engine",
    "initializing_with",
    "refuse_in_fit",
    "refuse_trained",
]


def refuse_trained(module: torch.nn.Module) -> None:
    """Refuse a module whose parameters an engine is training.

    Raises:
        UnsupportedError: The module has such parameters, or was partitioned over a process group that has ended.
    """
    check_process_groups(module)
    if any(owner.rank_state.is_open for owner in trainings_of(module)):
        raise UnsupportedError(
            f"{type(module).__name__} is being trained; it cannot be set up once more without its optimizer.",
            "Use the model that fabric.setup returned with the optimizer, after model.eval().",
        )


def refuse_in_fit(module: torch.nn.Module) -> None:
    """Refuse a module that a Trainer is fitting: another engine would take the module away from the fit.

    Raises:
        UnsupportedError: A fit of the module is in progress, or the module was partitioned over a process group that
            has ended.
    """
    check_process_groups(module)
    if any(owner.rank_state.is_open and owner.rank_state.in_fit for owner in trainings_of(module)):
        raise UnsupportedError(
            f"{type(module).__name__} is being fitted by another Trainer.",
            "Evaluate it by that fit's own validation, or when it is over; or use a copy made before the fit.",
        )


def build_evaluation_engine(
    model: torch.nn.Module, config: DeepSpeedConfig, *, device_index: int | None
) -> EvaluationEngine:
    """Build an engine without an optimizer: it only gathers parameters, as ZeRO-3 does.

    Args:
        model: Module to evaluate. The user's hooks stay; those of earlier engines are removed.
        config: DeepSpeed's configuration, as for training.
        device_index: Index of the training device.
    """
    check_layers(model)
    check_dtype(model, config)
    release_module(model)
    needed = ("fp16", "bf16", "zero_allow_untested_optimizer", "zero_optimization")
    with evaluation_engine():
        engine, *_ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=device_index),
            config={"train_micro_batch_size_per_gpu": 1, **{name: config[name] for name in needed if name in config}},
            model=model,
            model_parameters=[],
            dist_init_required=False,
        )
    return engine  # type: ignore[no-any-return]


@contextmanager
def evaluation_engine() -> Iterator[None]:
    """Let ``deepspeed.initialize`` build an :class:`EvaluationEngine` within this context."""
    with replaced(deepspeed, "DeepSpeedEngine", EvaluationEngine):
        yield


@contextmanager
def engine_with(offload: OffloadSettings) -> Iterator[None]:
    """Let ``deepspeed.initialize`` build a :class:`SmartInfinityEngine` within this context."""
    with replaced(deepspeed, "DeepSpeedEngine", functools.partial(SmartInfinityEngine, offload=offload)):
        yield


@contextmanager
def initializing_with(initialize: Callable[..., object]) -> Iterator[None]:
    """Redirect ``deepspeed.initialize`` within this context.

    Args:
        initialize: Function that takes the original as its first argument.
    """
    with replaced(deepspeed, "initialize", functools.partial(initialize, deepspeed.initialize)):
        yield
