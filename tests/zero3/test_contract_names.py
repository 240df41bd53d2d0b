"""Tests the private names that this package reads from DeepSpeed, torch, Lightning and Fabric."""

from __future__ import annotations

import inspect
import warnings
from unittest import mock

import lightning.pytorch as pl
import pydantic
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import constants
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from lightning.fabric import Fabric
from lightning.fabric.strategies import deepspeed as stock
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer, _unwrap_objects
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.distributed.constants import default_pg_timeout
from torch.utils.data import DataLoader

from lightning_smartinfinity.integrations.fabric.strategy import SmartInfinityFabricStrategy
from lightning_smartinfinity.integrations.precision import SmartInfinityFabricPrecision
from lightning_smartinfinity.settings.options import ACCEPTED, REFUSED_KEYS
from tests.zero3.test_contract import passed


@pytest.mark.seam("check_zero_section answers wrong keys before the set-up, and before DeepSpeed may be imported")
def test_zero_section_has_the_fields_that_are_read() -> None:
    """deepspeed.runtime.zero.config parses the section zero_optimization into fields, and forbids unknown keys.

    We know every key of it and of its offload_param and leaf_module, and those only.
    """
    zero = DeepSpeedZeroConfig(stage=3, offload_param={"device": "nvme", "nvme_path": "/nowhere"})
    assert zero.param_persistence_threshold > 0 and zero.offload_param is not None
    assert zero.offload_param.device == "nvme" and min(zero.offload_param.buffer_count, zero.offload_param.buffer_size)
    assert "buffer_size" not in zero.offload_param.model_fields_set, "defaults would look like the user's"
    with pytest.raises(pydantic.ValidationError):
        DeepSpeedZeroConfig(stage=3, unknown_key=1)
    listed = {*ACCEPTED["zero"], *REFUSED_KEYS}
    gone = {"super_offload", "mics_shard_size", "mics_hierarchical_params_gather"}
    beside = {key for key, refusal in REFUSED_KEYS.items() if "outside of this section" in refusal.fault}
    sections = (DeepSpeedZeroConfig, DeepSpeedZeroOffloadParamConfig, DeepSpeedZeroLeafModuleConfig)
    known = [listed - gone - beside, {*ACCEPTED["offload_param"]}, {*ACCEPTED["leaf_module"]}]
    assert known == [*map(_keys_of, sections)]


def _keys_of(config: type[pydantic.BaseModel]) -> set[str]:
    return {key for name, field in config.model_fields.items() for key in (name, field.alias) if key is not None}


@pytest.mark.seam("our files have DeepSpeed's format")
def test_keys_of_checkpoints_are_those_of_files_that_exist() -> None:
    """Keys of DeepSpeed's checkpoints, deepspeed.checkpoint.constants, stay those of files that exist."""
    keys = ["optimizer_state_dict", "fp32_flat_groups", "partition_count", "zero_stage", "loss_scaler", "param_shapes"]
    keys += ["frozen_param_fragments", "frozen_param_shapes", "param_groups"]
    assert [getattr(constants, key.upper()) for key in keys] == keys and ZeroStageEnum.weights == 3


@pytest.mark.seam("the default of our `timeout`")
def test_process_groups_have_a_default_timeout() -> None:
    """torch.distributed.constants.default_pg_timeout is the default of Lightning's ``timeout``."""
    theirs = inspect.signature(DeepSpeedStrategy.__init__).parameters["timeout"].default
    assert default_pg_timeout == theirs, "process groups of ours would time out at another time than stock's"


@pytest.mark.seam("loading module by module")
def test_a_module_loads_its_own_part_of_a_state_dict() -> None:
    """Module._load_from_state_dict loads a module's own part, with _metadata of a state dict; _modules has children."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    weights = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    missing, unexpected, errors = [], [], []  # type: ignore[var-annotated]
    metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
    (child,) = module._modules.values()
    assert child is not None
    child._load_from_state_dict(weights, "0.", metadata["0"], True, missing, unexpected, errors)
    assert (missing, unexpected, errors) == ([], [], [])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())


@pytest.mark.seam("SmartInfinityFabricStrategy saves stateful objects as Fabric does")
def test_fabric_converts_stateful_objects() -> None:
    """Strategy._convert_stateful_objects_in_state replaces an object by its state_dict, if it has one."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.ones(1, requires_grad=True)]), lambda _: 1.0)
    state = SmartInfinityFabricStrategy()._convert_stateful_objects_in_state({"a": scheduler, "b": 1}, filter={})
    assert state == {"a": scheduler.state_dict(), "b": 1}


@pytest.mark.seam("safe_get_full_*, full values of one parameter")
def test_fp32_state_is_gathered_from_a_parameter_and_its_slice() -> None:
    """_fp32_state_allgather takes the parameter and the rank's padded fp32 slice."""
    assert passed(DeepSpeedZeroOptimizer_Stage3._fp32_state_allgather) == ["self", "param", "fp32_state_partition"]


@pytest.mark.seam("schedulers do not warn")
def test_schedulers_ask_the_optimizer_whether_it_stepped() -> None:
    """A scheduler of torch warns that it stepped first unless our step sets the optimizer's _opt_called."""
    for stepped in (False, True):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        if stepped:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        assert bool(caught) != stepped, "every training with a scheduler would warn"


@pytest.mark.seam("gradients are used in the right order of streams")
def test_accelerator_says_how_its_streams_behave() -> None:
    """On a CPU nothing runs beside the caller: is_synchronized_device and resolves_data_dependency are true."""
    assert get_accelerator().is_synchronized_device() is get_accelerator().resolves_data_dependency() is True


@pytest.mark.seam("replacing the stage-3 class leaves DeepSpeed's own subclass alone")
def test_stage3_is_imported_before_its_class_is_replaced() -> None:
    """deepspeed.runtime.superoffload.superoffload_stage3 subclasses the stage-3 optimizer at import."""
    from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

    assert SuperOffloadOptimizer_Stage3.__mro__[1] is DeepSpeedZeroOptimizer_Stage3


@pytest.mark.seam("refusing compiled wrappers")
def test_compiled_wrapper_has_its_name() -> None:
    """torch.compile of a module returns a torch._dynamo.eval_frame.OptimizedModule."""
    wrapped = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert type(wrapped) is torch._dynamo.eval_frame.OptimizedModule


@pytest.mark.seam("16-bit gradients are then held in fp32 from the start")
def test_accumulation_scheduler_says_whether_it_accumulates() -> None:
    """GradientAccumulationScheduler.going_to_accumulate_grad_batches says whether it ever accumulates."""
    for scheduling, accumulates in (({0: 1, 4: 2}, True), ({0: 1}, False)):
        assert GradientAccumulationScheduler(scheduling).going_to_accumulate_grad_batches() == accumulates


@pytest.mark.seam("`self.dtype` of Lightning's modules is that of their parameters")
def test_modules_of_lightning_are_told_their_dtype() -> None:
    """device_dtype_mixin._update_properties sets the dtype of modules; DeepSpeedPrecision._desired_dtype has it."""
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties

    outer, inner = pl.LightningModule(), pl.LightningModule()
    outer.inner, inner.layer = inner, torch.nn.Linear(1, 1)
    _update_properties(outer, dtype=torch.bfloat16)
    assert {outer.dtype, inner.dtype} == {torch.bfloat16}
    assert DeepSpeedPrecision("bf16-mixed")._desired_dtype == torch.bfloat16
    assert inner.layer.weight.dtype == torch.float32


# ---- Lightning Fabric, and DeepSpeed as Fabric uses it


@pytest.mark.seam("SmartInfinityFabricStrategy builds our engines")
def test_engines_are_built_through_one_method() -> None:
    """Both kinds of set-up call _initialize_engine, whose engine the user gets."""
    module, strategy = torch.nn.Linear(1, 1), mock.MagicMock()
    optimizer = torch.optim.SGD(module.parameters())
    strategy._initialize_engine.return_value = ("engine", "optimizer", "scheduler")
    assert "engine" in stock.DeepSpeedStrategy.setup_module_and_optimizers(strategy, module, [optimizer])
    assert stock.DeepSpeedStrategy.setup_module(strategy, module) == "engine"
    assert strategy._initialize_engine.call_count == 2, "stock engines would be built instead of ours"


@pytest.mark.seam("training on a CPU")
def test_distributed_setup_formats_the_config_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """_setup_distributed: _set_world_ranks, _init_deepspeed_distributed, _config_initialized, and GPU indices."""
    validated: list[object] = []
    monkeypatch.setattr(stock, "_validate_device_index_selection", validated.append)
    strategy = mock.MagicMock(_config_initialized=False)
    stock.DeepSpeedStrategy._setup_distributed(strategy)
    called = [call[0] for call in strategy.method_calls]
    assert called == ["_set_world_ranks", "_init_deepspeed_distributed", "_format_config"], "a CPU leaves something out"
    assert len(validated) == 1 and strategy._config_initialized is True
    stock.DeepSpeedStrategy._setup_distributed(strategy)
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
