"""Tests the seams behind everything that a Trainer does besides plain steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity.integrations.precision import SmartInfinityPrecision
from lightning_smartinfinity.integrations.trainer.strategy import SmartInfinityStrategy
from lightning_smartinfinity.zero3.optimizer import release
from tests.zero3.test_contract import passed


@pytest.mark.seam("SmartInfinityStrategy: no wrong warning about clipping; the user's hooks stay on the module")
@pytest.mark.parametrize("name", ["init_deepspeed", "_initialize_deepspeed_inference"])
def test_replaced_strategy_hooks_have_the_signature_of_their_base(name: str) -> None:
    """Every hook that our strategy replaces has the parameters of its base."""
    assert passed(getattr(DeepSpeedStrategy, name)) == passed(getattr(SmartInfinityStrategy, name))


@pytest.mark.seam("SmartInfinityPrecision: clipping, `training_step` returning None, no lost imaginary parts")
@pytest.mark.parametrize("name", ["optimizer_step", "clip_gradients", "convert_module"])
def test_replaced_precision_hooks_have_the_signature_of_their_base(name: str) -> None:
    """Every hook of DeepSpeedPrecision that ours replaces has the parameters of its base."""
    assert passed(getattr(DeepSpeedPrecision, name)) == passed(getattr(SmartInfinityPrecision, name))


@pytest.mark.seam("`release_module` removes DeepSpeed's completely, and those of others stay")
@pytest.mark.parametrize(
    "registering",
    [
        lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
        lambda module, hook: module.register_forward_hook(hook, with_kwargs=True, always_call=True),
        lambda module, hook: module.register_full_backward_pre_hook(hook),
        lambda module, hook: module.register_full_backward_hook(hook),
    ],
)
def test_torch_keeps_hooks_where_they_are_removed(registering: Callable[[torch.nn.Module, Any], object]) -> None:
    """Torch keeps hooks in _forward_pre_hooks, _forward_hooks, _backward_pre_hooks, _backward_hooks,
    _forward_hooks_with_kwargs, _forward_hooks_always_called and _forward_pre_hooks_with_kwargs.
    """
    module, ran = torch.nn.Linear(1, 1), []
    before = {name: dict(kept) for name, kept in vars(module).items() if "hook" in name and isinstance(kept, dict)}
    for owner in ("deepspeed.runtime", __name__, None):  # a function of exec has no module
        hook: Any = lambda *_, owner=owner: ran.append(owner)  # noqa: E731
        hook.__module__ = owner
        registering(module, hook)
    release._remove_hooks(module)
    module(torch.ones(1, 1, requires_grad=True)).sum().backward()
    assert ran in ([__name__, None], [None, __name__]), "hooks of an earlier engine would run in the next fit"
    left = {name: len(kept) - len(before[name]) for name, kept in vars(module).items() if name in before}
    assert max(left.values()) == 2, "flags of removed hooks stay"


@pytest.mark.seam("SmartInfinityStrategy replaces it without a warning that is untrue and a refusal made earlier")
@pytest.mark.parametrize(("training", "call"), [(True, "train"), (False, "inference")])
def test_init_deepspeed_does_nothing_but_warn_refuse_and_initialize(training: bool, call: str) -> None:
    """DeepSpeedStrategy.init_deepspeed does nothing but a warning, a refusal and the set-up."""
    module = pl.LightningModule()
    strategy = mock.MagicMock(model=module, lightning_module=mock.MagicMock())
    strategy.lightning_module.trainer.training = training
    DeepSpeedStrategy.init_deepspeed(strategy)
    called = [name for name, *_ in strategy.method_calls if not name.startswith("lightning_module.")]
    assert called == [f"_initialize_deepspeed_{call}"], "what stock does beside it is left out in ours"
