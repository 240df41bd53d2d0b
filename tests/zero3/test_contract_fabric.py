"""The private seams of Lightning Fabric, and of DeepSpeed as Fabric meets it, that this package stands on."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.fabric import Fabric
from lightning.fabric.connector import _Connector
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _FabricOptimizer

from lightning_smartinfinity.fabric import SmartInfinityFabricStrategy
from lightning_smartinfinity.zero3.client_state import RESERVED_KEYS


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
    """Both kinds of set-up call _initialize_engine, whose result for an optimizer is what the user gets."""
    for name in ("setup_module_and_optimizers", "setup_module"):
        assert "self._initialize_engine(module" in inspect.getsource(getattr(DeepSpeedStrategy, name))


def test_distributed_setup_formats_the_config_once() -> None:
    """What _setup_distributed does on CUDA is what ours does on a CPU, but for the validation of GPU indices."""
    lines = textwrap.dedent(inspect.getsource(DeepSpeedStrategy._setup_distributed)).splitlines()
    assert [line.strip() for line in lines[2:]] == [
        "assert self.parallel_devices is not None",
        "_validate_device_index_selection(self.parallel_devices)",
        "reset_seed()",
        "self._set_world_ranks()",
        "self._init_deepspeed_distributed()",
        "if not self._config_initialized:",
        "self._format_config()",
        "self._config_initialized = True",
    ]


def test_connector_sets_the_precision_on_the_strategy() -> None:
    """Fabric reads the plugin back from the strategy, whose setter swaps it."""
    assert "self.strategy.precision = self.precision" in inspect.getsource(_Connector._lazy_init_strategy)
    assert "self._precision: Precision = self._strategy.precision" in inspect.getsource(Fabric.__init__)


def test_no_backward_sync_asks_the_strategys_control() -> None:
    """A control of its own keeps Fabric from warning that the strategy cannot skip synchronization."""
    assert _BackwardSyncControl.__abstractmethods__ == {"no_backward_sync"}
    assert "_backward_sync_control.no_backward_sync(" in inspect.getsource(Fabric.no_backward_sync)


def test_fabric_wraps_optimizers_by_their_class() -> None:
    """The wrapper inherits from the class of what it wraps, so that methods run with the wrapper as self."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    wrapper = _FabricOptimizer(inner, SmartInfinityFabricStrategy())
    assert isinstance(wrapper, torch.optim.SGD) and wrapper.param_groups is inner.param_groups


def test_names_in_deepspeeds_checkpoints_are_those_that_we_refuse() -> None:
    """Whatever DeepSpeed puts beside a user's entries is reserved."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(DeepSpeedEngine._common_checkpoint_state)))
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Return)).value
    assert isinstance(call, ast.Call)
    names = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    assert "module" in names and names <= RESERVED_KEYS
    assert "state.update(client_state)" in inspect.getsource(DeepSpeedEngine._save_checkpoint)


def test_engine_takes_what_we_pass_to_its_checkpoints() -> None:
    """Saving and loading go to the engine itself, by keywords."""
    saving = {"client_state", "tag", "exclude_frozen_parameters"}
    loading = {"tag", "load_optimizer_states", "load_lr_scheduler_states", "load_module_strict"}
    assert saving <= set(inspect.signature(DeepSpeedEngine.save_checkpoint).parameters)
    assert loading <= set(inspect.signature(DeepSpeedEngine.load_checkpoint).parameters)
