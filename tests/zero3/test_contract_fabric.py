"""Tests the private seams of Lightning Fabric, and of DeepSpeed as Fabric uses it, that this package relies on."""

from __future__ import annotations

import inspect
import os
from unittest import mock

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.fabric import Fabric
from lightning.fabric.strategies import deepspeed as stock
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer, _unwrap_objects

from lightning_smartinfinity.integrations.fabric.strategy import SmartInfinityFabricStrategy
from lightning_smartinfinity.integrations.precision import SmartInfinityFabricPrecision


def test_strategy_has_every_attribute_of_its_base() -> None:
    """Our constructor, which skips DeepSpeedStrategy's, sets every attribute that it would have set."""
    assert set(vars(DeepSpeedStrategy(stage=3))) <= set(vars(SmartInfinityFabricStrategy()))


@pytest.mark.parametrize(
    "name",
    [
        "setup_environment",
        "_setup_distributed",
        "_format_config",
        "module_sharded_context",
        "setup_module_and_optimizers",
        "_initialize_engine",
        "backward",
        "clip_gradients_norm",
        "clip_gradients_value",
        "save_checkpoint",
        "load_checkpoint",
    ],
)
def test_strategy_hooks_have_the_signature_of_their_base(name: str) -> None:
    """Every overridden hook takes what Fabric passes."""
    theirs = inspect.signature(getattr(DeepSpeedStrategy, name))
    ours = inspect.signature(getattr(SmartInfinityFabricStrategy, name))
    assert list(theirs.parameters) == list(ours.parameters)


def test_engines_are_built_through_one_method() -> None:
    """Both kinds of set-up call _initialize_engine, whose engine the user gets and ours is built there."""
    module, strategy = torch.nn.Linear(1, 1), mock.MagicMock()
    optimizer = torch.optim.SGD(module.parameters())
    strategy._initialize_engine.return_value = ("engine", "optimizer", "scheduler")
    assert "engine" in DeepSpeedStrategy.setup_module_and_optimizers(strategy, module, [optimizer])
    assert DeepSpeedStrategy.setup_module(strategy, module) == "engine"
    assert strategy._initialize_engine.call_count == 2, "stock engines would be built instead of ours"


def test_distributed_setup_formats_the_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """_setup_distributed does on CUDA what our strategy does on a CPU, and validates the GPU indices besides."""
    validated: list[object] = []
    monkeypatch.setattr(stock, "_validate_device_index_selection", validated.append)
    strategy = mock.MagicMock(_config_initialized=False)
    DeepSpeedStrategy._setup_distributed(strategy)
    called = [call[0] for call in strategy.method_calls]
    assert called == ["_set_world_ranks", "_init_deepspeed_distributed", "_format_config"], "a CPU leaves something out"
    assert len(validated) == 1 and strategy._config_initialized is True
    DeepSpeedStrategy._setup_distributed(strategy)
    assert strategy._format_config.call_count == 1


def test_connector_sets_the_precision_on_the_strategy() -> None:
    """Fabric reads the plugin back from the strategy, whose setter in integrations/fabric/strategy.py swaps it."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SmartInfinityFabricStrategy(), precision="bf16-mixed")
    assert type(fabric.strategy.precision) is SmartInfinityFabricPrecision
    assert fabric._precision is fabric.strategy.precision, "Fabric would go on with DeepSpeed's own plugin"


def test_no_backward_sync_asks_the_strategys_control() -> None:
    """The strategy's own control keeps Fabric from warning that the strategy cannot skip synchronization."""
    assert _BackwardSyncControl.__abstractmethods__ == {"no_backward_sync"}
    strategy = mock.MagicMock(spec=SmartInfinityFabricStrategy, _backward_sync_control=mock.MagicMock())
    fabric, module = mock.MagicMock(_strategy=strategy, strategy=strategy), torch.nn.Linear(1, 1)
    Fabric.no_backward_sync(fabric, _FabricModule(module, strategy))
    assert strategy._backward_sync_control.no_backward_sync.called, "every user of no_backward_sync would be warned"


def test_a_state_is_unwrapped_as_fabric_save_does() -> None:
    """Fabric unwraps the objects of a state that it has wrapped, and leaves other values as they are."""
    module, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    strategy = SmartInfinityFabricStrategy()
    state = {"model": _FabricModule(module, strategy), "optimizer": _FabricOptimizer(optimizer, strategy), "step": 1}
    assert _unwrap_objects(state) == {"model": module, "optimizer": optimizer, "step": 1}


def test_fabric_wraps_optimizers_by_their_class() -> None:
    """The wrapper inherits from the class of what it wraps, so that methods run with the wrapper as self."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    wrapper = _FabricOptimizer(inner, SmartInfinityFabricStrategy())
    assert isinstance(wrapper, torch.optim.SGD) and wrapper.param_groups is inner.param_groups


def test_engine_takes_what_we_pass_to_its_checkpoints() -> None:
    """The engine's save_checkpoint and load_checkpoint take the keywords that we pass."""
    saving = {"client_state", "tag", "exclude_frozen_parameters"}
    loading = {"tag", "load_optimizer_states", "load_lr_scheduler_states", "load_module_strict"}
    assert saving <= set(inspect.signature(DeepSpeedEngine.save_checkpoint).parameters)
    assert loading <= set(inspect.signature(DeepSpeedEngine.load_checkpoint).parameters)
