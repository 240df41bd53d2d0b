"""The seams behind everything that a Trainer does beside plain steps."""

from __future__ import annotations

import inspect
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.trainer import Trainer

from lightning_smartinfinity.precision import SmartInfinityPrecision
from lightning_smartinfinity.strategy import SmartInfinityStrategy


@pytest.mark.parametrize("name", ["init_deepspeed", "_initialize_deepspeed_inference"])
def test_replaced_strategy_hooks_have_the_signature_of_their_base(name: str) -> None:
    """What our strategy replaces, it is called with."""
    theirs = inspect.signature(getattr(DeepSpeedStrategy, name))
    assert list(theirs.parameters) == list(inspect.signature(getattr(SmartInfinityStrategy, name)).parameters)


@pytest.mark.parametrize("name", ["optimizer_step", "clip_gradients"])
def test_replaced_precision_hooks_have_the_signature_of_their_base(name: str) -> None:
    """What our precision plugin replaces, it is called with."""
    theirs = inspect.signature(getattr(DeepSpeedPrecision, name))
    assert list(theirs.parameters) == list(inspect.signature(getattr(SmartInfinityPrecision, name)).parameters)


def test_init_deepspeed_does_nothing_but_warn_refuse_and_initialize() -> None:
    """Ours leaves out a warning that is not true here and a refusal made earlier."""
    source = inspect.getsource(DeepSpeedStrategy.init_deepspeed)
    calls = [line.strip() for line in source.splitlines() if line.strip().startswith("self._")]
    assert calls == [
        "self._initialize_deepspeed_train(self.model)",
        "self._initialize_deepspeed_inference(self.model)",
    ]


def test_callbacks_are_complete_before_setup_environment_and_set_up_after_it() -> None:
    """Refusing a callback in setup_environment comes after configure_callbacks and before any callback acts."""
    source = inspect.getsource(Trainer._run)
    order = [
        source.index(call)
        for call in ("_attach_model_callbacks()", "setup_environment()", "_call_setup_hook(", "_call_configure_model(")
    ]
    assert order == sorted(order)


def test_the_accumulation_scheduler_asks_its_trainer_for_the_strategy() -> None:
    """Its check reads trainer.strategy, in a method that the Trainer looks up on the instance."""
    assert "isinstance(trainer.strategy, DeepSpeedStrategy)" in inspect.getsource(
        GradientAccumulationScheduler.on_train_start
    )
    assert "getattr(callback, hook_name)" in inspect.getsource(call._call_callback_hooks)


def test_hooks_of_deepspeed_can_be_told_by_their_module() -> None:
    """Engine and parameter offload register functions of their own, not partials or bound methods of torch."""
    for owner in (DeepSpeedEngine, parameter_offload.DeepSpeedZeRoOffload):
        source = inspect.getsource(owner)
        assert "register_forward_pre_hook(functools" not in source
        assert "register_forward_hook(functools" not in source
    assert isinstance(parameter_offload.FWD_MODULE_STACK, list)
    assert hasattr(ZeroParamStatus, "AVAILABLE")
    assert "._in_forward = True" in inspect.getsource(DeepSpeedEngine._forward_prologue)
    assert "module.ds_inflight_param_registry" in inspect.getsource(parameter_offload.DeepSpeedZeRoOffload.__init__)


def test_torch_keeps_hooks_where_they_are_removed() -> None:
    """The dictionaries of a module that hooks and what belongs to them lie in."""
    module = torch.nn.Linear(1, 1)
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        assert name in vars(module)
    for name in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
        assert name in vars(module)
