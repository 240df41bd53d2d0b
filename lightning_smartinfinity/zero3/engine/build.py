"""Builds engines by ``deepspeed.initialize``, and refuses modules that another engine is training.

The parameters of a partitioned module without an engine are empty. A teacher or a reward model often has no engine,
because user code does not set it up. Such a module gets an evaluation engine when it is called
(:func:`gathering_when_called`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

from lightning_smartinfinity.common.patches import replaced, wrapped
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.engine.portable import EvaluationEngine, PortableEngine
from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from lightning_smartinfinity.zero3.optimizer.release import has_engine, release_module, trainings_of
from lightning_smartinfinity.zero3.parameters.module_copies import sync_generation
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper, swapping_with
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.environment import having_local_rank
from lightning_smartinfinity.zero3.setup.validation import SIXTEEN_BIT, check_dtype, check_layers, check_process_groups
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig, ZeroInit, ZeroParameter

__all__ = [
    "build_evaluation_engine",
    "engine_with",
    "evaluation_config",
    "evaluation_engine",
    "gathering_when_called",
    "initializing_with",
    "refuse_in_fit",
    "refuse_trained",
]


def refuse_trained(module: torch.nn.Module) -> None:
    """Refuse a module whose parameters an engine is training.

    Raises:
        UnsupportedError: An engine trains the module, or the module was partitioned over a process group that has
            ended.
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
    """Build an engine without an optimizer, which only gathers ZeRO-3's parameters.

    Args:
        model: Module to evaluate. Hooks of earlier engines are removed; the user's hooks stay.
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


def evaluation_config(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """Return DeepSpeed's configuration for an engine without an optimizer, which needs no batch sizes.

    Args:
        config: A configuration for training, in which values may still be "auto".
    """
    return {"train_micro_batch_size_per_gpu": 1, **{name: value for name, value in config.items() if value != "auto"}}


@contextmanager
def evaluation_engine() -> Iterator[None]:
    """Make ``deepspeed.initialize`` build an :class:`EvaluationEngine` within this context."""
    with replaced(deepspeed, "DeepSpeedEngine", functools.partial(_build, EvaluationEngine)):
        yield


@contextmanager
def engine_with(offload: OffloadSettings) -> Iterator[None]:
    """Make ``deepspeed.initialize`` build a :class:`SmartInfinityEngine` within this context."""
    engine = functools.partial(SmartInfinityEngine, offload=offload)
    with replaced(deepspeed, "DeepSpeedEngine", functools.partial(_build, engine)):
        yield


def _build(engine: Callable[..., PortableEngine], **kwargs: Any) -> PortableEngine:
    built = engine(**kwargs)
    _gather_when_called(built.module.modules(), kwargs["config"])  # for calls after this engine is gone
    return built


@contextmanager
def gathering_when_called(config: Callable[[], DeepSpeedConfig]) -> Iterator[None]:
    """Make modules that ZeRO-3 partitions while building them, within this context, usable without an engine.

    Such a module gets an evaluation engine when it is first called, unless it belongs to another engine by then.

    Args:
        config: Function that returns DeepSpeed's configuration; called when a module is built.
    """

    def finish(original: Callable[..., None], init: ZeroInit, module: torch.nn.Module) -> None:
        original(init, module)
        _gather_when_called([module], config())

    with wrapped(Init, "_post_init_method", finish):
        yield


def _gather_when_called(modules: Iterable[torch.nn.Module], config: DeepSpeedConfig) -> None:
    def gather(module: torch.nn.Module, args: Any, kwargs: Any = None) -> Any:
        if has_engine(module) or partition_parameters.zero_init_context or not _has_partitioned(module):
            return None
        before, stack = set(module._forward_pre_hooks), list(parameter_offload.FWD_MODULE_STACK)
        _evaluate(module, config)
        parameter_offload.FWD_MODULE_STACK[:] = stack  # another module's forward may be in progress
        # torch runs only the hooks that the module had when the call began, so run the engine's new ones here.
        for number, missed in module._forward_pre_hooks.items():
            if number not in before and number in module._forward_pre_hooks_with_kwargs:
                args, kwargs = missed(module, args, kwargs) or (args, kwargs)
            elif number not in before and (changed := missed(module, args)) is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        return args if kwargs is None else (args, kwargs)  # some copies of modules lose the hook's with_kwargs flag

    hook = functools.wraps(gather)(torch.compiler.disable(gather))  # type: ignore[no-untyped-call]
    for module in modules:
        sync_generation(module)
        if all(getattr(hook, "__module__", "") != __name__ for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _has_partitioned(module: torch.nn.Module) -> bool:
    return any(getattr(param, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE for param in module.parameters())


def _evaluate(module: torch.nn.Module, config: DeepSpeedConfig) -> None:
    """Build an evaluation engine, which exists as long as its hooks are on the module."""
    if any(owner.rank_state.is_open for owner in trainings_of(module)):
        raise UnsupportedError(
            f"{type(module).__name__} was called without its engine, and has parameters that are being trained.",
            "Call the model that is trained, or a copy made before the training.",
        )
    parts: list[ZeroParameter] = [param for param in module.parameters() if hasattr(param, "ds_tensor")]
    dtypes = {param.ds_tensor.dtype for param in parts}
    precision = {name: {"enabled": dtype in dtypes} for name, dtype in SIXTEEN_BIT.items()}  # config may have "auto"
    swapper = parts[0].nvme_swapper
    with having_local_rank(), swapping_with(swapper) if isinstance(swapper, ParameterSwapper) else nullcontext():
        index = int(get_accelerator().current_device())
        build_evaluation_engine(module, {**config, **precision}, device_index=index)


@contextmanager
def initializing_with(initialize: Callable[..., object]) -> Iterator[None]:
    """Redirect ``deepspeed.initialize`` within this context.

    Args:
        initialize: Function that takes the original as its first argument.
    """
    with replaced(deepspeed, "initialize", functools.partial(initialize, deepspeed.initialize)):
        yield
