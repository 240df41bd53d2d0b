"""Tests the private seams of Lightning Fabric, and of DeepSpeed as Fabric uses it, that this package relies on."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.fabric import Fabric
from lightning.fabric.strategies import deepspeed as stock
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer, _unwrap_objects
from torch.utils.data import DataLoader

from lightning_smartinfinity.integrations.fabric.strategy import SmartInfinityFabricStrategy
from lightning_smartinfinity.integrations.precision import SmartInfinityFabricPrecision
from tests.zero3.test_contract import passed


@pytest.mark.seam("SmartInfinityFabricStrategy builds our engines")
def test_engines_are_built_through_one_method() -> None:
    """Both kinds of set-up call _initialize_engine, whose engine the user gets."""
    module, strategy = torch.nn.Linear(1, 1), mock.MagicMock()
    optimizer = torch.optim.SGD(module.parameters())
    strategy._initialize_engine.return_value = ("engine", "optimizer", "scheduler")
    assert "engine" in DeepSpeedStrategy.setup_module_and_optimizers(strategy, module, [optimizer])
    assert DeepSpeedStrategy.setup_module(strategy, module) == "engine"
    assert strategy._initialize_engine.call_count == 2, "stock engines would be built instead of ours"


@pytest.mark.seam("training on a CPU")
def test_distributed_setup_formats_the_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """_setup_distributed: _set_world_ranks, _init_deepspeed_distributed, _config_initialized, and GPU indices."""
    validated: list[object] = []
    monkeypatch.setattr(stock, "_validate_device_index_selection", validated.append)
    strategy = mock.MagicMock(_config_initialized=False)
    DeepSpeedStrategy._setup_distributed(strategy)
    called = [call[0] for call in strategy.method_calls]
    assert called == ["_set_world_ranks", "_init_deepspeed_distributed", "_format_config"], "a CPU leaves something out"
    assert len(validated) == 1 and strategy._config_initialized is True
    DeepSpeedStrategy._setup_distributed(strategy)
    assert strategy._format_config.call_count == 1


@pytest.mark.seam("our precision plugin replaces the one that the connector builds")
def test_connector_sets_the_precision_on_the_strategy() -> None:
    """_Connector._lazy_init_strategy sets strategy.precision, and Fabric.__init__ reads it back."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SmartInfinityFabricStrategy(), precision="bf16-mixed")
    assert type(fabric.strategy.precision) is SmartInfinityFabricPrecision
    assert fabric._precision is fabric.strategy.precision, "Fabric would go on with DeepSpeed's own plugin"


@pytest.mark.seam("Fabric, too, keeps the order of DataLoaders: one process its sampler, several the user's shuffle")
@pytest.mark.parametrize("shuffle", [False, True])
def test_fabric_adds_samplers_by_the_strategys_options(shuffle: bool) -> None:
    """_requires_distributed_sampler asks distributed_sampler_kwargs, and _get_distributed_sampler the DataLoader."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SmartInfinityFabricStrategy())
    loader = DataLoader(range(4), shuffle=shuffle)  # type: ignore[arg-type]
    assert not fabric._requires_distributed_sampler(loader)
    with mock.patch.object(SmartInfinityFabricStrategy, "distributed_sampler_kwargs", {}):
        assert fabric._requires_distributed_sampler(loader)
    assert fabric._get_distributed_sampler(loader, num_replicas=2, rank=0).shuffle == shuffle


@pytest.mark.seam("no_backward_sync without a warning")
def test_no_backward_sync_asks_the_strategys_control() -> None:
    """Fabric asks Strategy._backward_sync_control for a _BackwardSyncControl, or warns."""
    assert _BackwardSyncControl.__abstractmethods__ == {"no_backward_sync"}
    strategy = mock.MagicMock(spec=SmartInfinityFabricStrategy, _backward_sync_control=mock.MagicMock())
    fabric, module = mock.MagicMock(_strategy=strategy, strategy=strategy), torch.nn.Linear(1, 1)
    Fabric.no_backward_sync(fabric, _FabricModule(module, strategy))
    assert strategy._backward_sync_control.no_backward_sync.called, "every user of no_backward_sync would be warned"


@pytest.mark.seam("methods of TakenOptimizer use instance attributes only, as a wrapper's class inherits from theirs")
@pytest.mark.seam("`fabric.strategy.record` takes the state that `fabric.save` takes, with what Fabric wrapped")
def test_a_state_is_unwrapped_as_fabric_save_does() -> None:
    """lightning.fabric.wrappers._unwrap_objects unwraps what Fabric has wrapped, and nothing else.

    _FabricOptimizer inherits from the class of what it wraps, whose methods run with the wrapper as self.
    """
    module, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    strategy = SmartInfinityFabricStrategy()
    wrapper = _FabricOptimizer(optimizer, strategy)
    assert isinstance(wrapper, torch.optim.SGD) and wrapper.param_groups is optimizer.param_groups
    state = {"model": _FabricModule(module, strategy), "optimizer": wrapper, "step": 1}
    assert _unwrap_objects(state) == {"model": module, "optimizer": optimizer, "step": 1}


@pytest.mark.seam("save_engine and load_engine go to the engine itself")
def test_engine_takes_what_we_pass_to_its_checkpoints() -> None:
    """DeepSpeedEngine.save_checkpoint and load_checkpoint take the keywords that we pass."""
    saving = {"client_state", "tag", "exclude_frozen_parameters"}
    loading = {"tag", "load_optimizer_states", "load_lr_scheduler_states", "load_module_strict"}
    assert saving <= {*passed(DeepSpeedEngine.save_checkpoint)}
    assert loading <= {*passed(DeepSpeedEngine.load_checkpoint)}
