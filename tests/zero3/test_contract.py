"""Tests the private seams of the installed DeepSpeed and Lightning that this package relies on, and names it reads."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed.ops
import lightning.pytorch as pl
import pydantic
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import constants
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups
from lightning.fabric import Fabric
from lightning.fabric.strategies import deepspeed as stock
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer, _unwrap_objects
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.distributed.constants import default_pg_timeout
from torch.utils.data import DataLoader

from lightning_smartinfinity.integrations.fabric.strategy import SmartInfinityFabricStrategy
from lightning_smartinfinity.integrations.precision import SmartInfinityFabricPrecision, SmartInfinityPrecision
from lightning_smartinfinity.integrations.trainer.strategy import SmartInfinityStrategy
from lightning_smartinfinity.settings.options import ACCEPTED, REFUSED_KEYS
from lightning_smartinfinity.zero3.checkpoints.save.checkpoint_engine import SmartInfinityCheckpointEngine
from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from lightning_smartinfinity.zero3.optimizer import release
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from tests.helpers.assertions import assert_equal


def undecorated(function: Any) -> Any:
    """Return the function under DeepSpeed's instrument_w_nvtx, which does not keep the signature."""
    while function.__name__ == "wrapped_fn":
        function = next(cell.cell_contents for cell in function.__closure__ if callable(cell.cell_contents))
    return function


def passed(function: Any) -> list[str]:
    """Return the names of a function's parameters, in their order."""
    return list(inspect.signature(undecorated(function)).parameters)


def lacking(member: Any, *texts: str) -> list[str]:
    """Return those texts that are not in the source of a function, class or module."""
    source = inspect.getsource(undecorated(member))
    return [text for text in texts if text not in source]


def assert_in_order(member: Any, *texts: str) -> None:
    """Assert that a source has these texts, for the first time in this order."""
    assert [*texts] == sorted(texts, key=inspect.getsource(undecorated(member)).index)


OVERRIDING: list[tuple[Any, Any, list[str]]] = [
    (
        StorageOptimizer,
        DeepSpeedZeroOptimizer_Stage3,
        [
            *("_setup_for_real_optimizer", "_create_fp32_partitions", "_partition_all_parameters", "destroy"),
            *("partition_grads", "reduce_ready_partitions_and_remove_grads", "backward_epilogue", "zero_grad", "step"),
            *("reduce_independent_p_g_buckets_and_remove_grads", "checkpoint_event_prologue"),
            "create_reduce_and_remove_grad_hooks",
            *("_rigid_state_dict", "_rigid_load_state_dict", "_restore_from_bit16_weights"),
            *("_get_fp32_grad_state_partition", "_get_fp32_opt_state_partition"),
            *("set_full_hp_param", "set_local_hp_param", "get_fp32_grad_for_param", "get_local_fp32_grad_for_param"),
            *("set_fp32_grad_for_param", "set_local_grad_for_param", "update_fp32_grad_for_param_vectorized"),
            *("offload_states", "reload_states"),
        ],
    ),
    (
        SmartInfinityEngine,
        DeepSpeedEngine,
        [
            *("_configure_zero_optimizer", "_configure_distributed_model", "_broadcast_model", "_do_sanity_check"),
            *("_configure_checkpointing", "_check_for_duplicates", "_get_param_fragment_func", "_copy_recovery_script"),
            *("_get_all_ckpt_names", "_get_all_zero_checkpoint_names", "save_checkpoint", "load_checkpoint"),
            *("module_state_dict", "load_module_state_dict", "offload_states", "destroy", "forward", "backward"),
            *("step", "get_global_grad_norm", "zero_grad", "set_gradient_accumulation_boundary"),
        ],
    ),
    (SmartInfinityCheckpointEngine, TorchCheckpointEngine, ["makedirs", "save", "load"]),
    (
        SmartInfinityStrategy,
        DeepSpeedStrategy,
        [
            *("connect", "setup_environment", "setup_distributed", "setup", "teardown", "on_exception", "barrier"),
            *(
                "process_dataloader",
                "on_train_start",
                "on_train_end",
                "on_validation_start",
                "on_test_start",
                "on_predict_start",
            ),
            *("validation_step", "test_step", "predict_step", "pre_backward", "block_backward_sync"),
            *("model_sharded_context", "optimizer_state", "save_checkpoint", "load_checkpoint", "remove_checkpoint"),
            *("init_deepspeed", "_initialize_deepspeed_inference", "_init_optimizers", "_setup_model_and_optimizer"),
            *("_format_config", "load_model_state_dict", "_restore_zero_state"),
        ],
    ),
    (
        SmartInfinityFabricStrategy,
        FabricDeepSpeedStrategy,
        [
            *("setup_environment", "_setup_distributed", "_format_config", "module_sharded_context", "backward"),
            *("setup_module_and_optimizers", "_initialize_engine", "clip_gradients_norm", "clip_gradients_value"),
            *("save_checkpoint", "load_checkpoint"),
        ],
    ),
    (
        SmartInfinityPrecision,
        DeepSpeedPrecision,
        [
            *("optimizer_step", "_clip_gradients", "clip_gradients", "backward"),
            *("convert_module", "convert_input", "forward_context"),
        ],
    ),
]


def overridden(ours: Any, theirs: Any) -> set[str]:
    """Return the names of the methods that our class, or a base of it, has instead of those of theirs."""
    methods = {name for name, member in inspect.getmembers(theirs, inspect.isfunction) if not name.startswith("__")}
    return {name for name in methods if getattr(ours, name) is not getattr(theirs, name)}


@pytest.mark.seam("StorageOptimizer has an arena and storage")
@pytest.mark.seam("SmartInfinityEngine: the engines that we build")
@pytest.mark.seam("SmartInfinityCheckpointEngine writes and reads checkpoints in windows")
@pytest.mark.seam("SmartInfinityStrategy: no wrong warning about clipping; the user's hooks stay on the module")
@pytest.mark.seam("SmartInfinityFabricStrategy")
@pytest.mark.seam("SmartInfinityPrecision: clipping, `training_step` returning None, no lost imaginary parts")
@pytest.mark.parametrize(("ours", "theirs", "names"), OVERRIDING, ids=[ours.__name__ for ours, *_ in OVERRIDING])
def test_overridden_methods_take_what_the_base_passes(ours: Any, theirs: Any, names: list[str]) -> None:
    """Every method that ours overrides exists, and ours has its parameters, in name and order, or passes them on."""
    assert overridden(ours, theirs) == {*names}, "a method of theirs has gone, or ours has another one: list it here"
    for name in names:
        parameters = inspect.signature(undecorated(getattr(ours, name))).parameters.values()
        own = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters)
        expected = passed(getattr(theirs, name))
        assert own == (expected[: len(own)] if passes_on else expected), f"what is passed to {name} has changed"


@pytest.mark.seam("TrainingSession and take_options set them, and DeepSpeed is imported after the accelerator is known")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(SmartInfinityStrategy, DeepSpeedStrategy), (SmartInfinityFabricStrategy, FabricDeepSpeedStrategy)],
)
def test_strategy_has_every_attribute_of_its_base(ours: Any, theirs: Any) -> None:
    """Our constructor sets every attribute that DeepSpeedStrategy.__init__, which it skips, would have set."""
    assert set(vars(theirs(stage=3))) <= set(vars(ours()))


@pytest.mark.seam("our method replaces it")
def test_setup_override_replaces_all_that_the_base_sets_up() -> None:
    """The base's _setup_for_real_optimizer assigns only what ours assigns or replaces."""
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer)
    assigned = {
        line.split("=")[0].split(":")[0].strip() for line in source.splitlines() if "self." in line and " = " in line
    }
    assert {name for name in assigned if name.startswith("self.")} == {
        "self.grad_partitions_flat_buffer",
        "self.__param_id_to_grad_partition",
        "self.__param_id_to_grad_partition[param.ds_id]",
    }


@pytest.mark.seam("StorageOptimizer never builds the map")
def test_private_gradient_map_is_only_read_where_overridden() -> None:
    """__param_id_to_grad_partition is used only by methods of the base that ours replaces or never enters."""
    users = {
        name
        for name, member in inspect.getmembers(DeepSpeedZeroOptimizer_Stage3, inspect.isfunction)
        if "__param_id_to_grad_partition" in inspect.getsource(member)
    }
    replaced = {"_setup_for_real_optimizer", "partition_grads", "_get_fp32_grad_state_partition"}
    not_entered = {
        "independent_gradient_partition_epilogue",  # only without offload_optimizer
        # Both are used only with managed_gradient_accumulation off, which nobody can set.
        "finalize_gradient_accumulation_boundary",
        "_finalize_offload_gradient_accumulation",
        "update_fp32_grad_for_param_vectorized",  # only without offload_optimizer
        "set_fp32_grad_for_param",
        "set_local_grad_for_param",
        "offload_states",  # refused by the engine
        "reload_states",  # only after the one above
    }
    assert users <= replaced | not_entered


@pytest.mark.seam("finding this rank's slice")
def test_rank_of_a_partition_is_asked_of_the_optimizer() -> None:
    """The optimizer's _get_param_partition_rank takes a parameter."""
    parameters = passed(DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank)
    assert parameters == ["self", "param"], "slices of other ranks would be taken for this one's"


@pytest.mark.seam("fp16 on a CPU, with torch's own kernels")
@pytest.mark.parametrize("supported", [True, False])
def test_engine_asks_the_accelerator_about_fp16_in_its_sanity_check_only(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeedEngine._do_sanity_check refuses fp16 if, and only if, the accelerator's is_fp16_supported does."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: supported)
    engine = mock.create_autospec(DeepSpeedEngine, instance=True, client_optimizer=None, client_lr_scheduler=None)
    engine.fp16_enabled.return_value, engine.bfloat16_enabled.return_value = True, False
    engine.optimizer_name.return_value, engine._supported_optims.return_value = None, []
    if supported:
        DeepSpeedEngine._do_sanity_check(engine)
        return
    with pytest.raises(ValueError, match="fp16 is not supported"):
        DeepSpeedEngine._do_sanity_check(engine)


@pytest.mark.seam("no compiled shared-memory collectives")
def test_shared_memory_op_can_be_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed consults deepspeed.ops.__compatible_ops__ before it compiles its shared-memory collectives."""
    from deepspeed.comm.torch import build_shm_op

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__, "zero3/setup/environment.py has nothing to decline"
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda _: mock.Mock(NAME="deepspeed_shm_comm"))
    assert build_shm_op() is None, "a compiler would be needed on every machine (zero3/setup/environment.py)"


@pytest.mark.seam("SmartInfinityEngine and check_parameters: the empty groups are put back")
def test_engine_removes_empty_groups_from_the_users_list() -> None:
    """DeepSpeedEngine._configure_optimizer drops empty groups from the list; sub_group_to_group_id numbers the rest."""
    removal = 'basic_optimizer.param_groups[:] = [pg for pg in basic_optimizer.param_groups if len(pg["params"]) != 0]'
    assert_in_order(DeepSpeedEngine._configure_optimizer, removal, "self._configure_zero_optimizer(")
    group_id = '"_ds_source_param_group_id"'  # or settings would go to other groups
    numbering = DeepSpeedZeroOptimizer_Stage3._get_trainable_parameter_groups
    assert lacking(numbering, "in enumerate(self.optimizer.param_groups)", group_id) == []
    sub_groups = undecorated(DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation)
    assert group_id in inspect.getsource(sub_groups).split("self.sub_group_to_group_id[sub_group_idx] =")[1]


@pytest.mark.seam("having_a_parameter: evaluating modules without parameters")
def test_the_offload_asks_the_first_parameter_for_its_dtype() -> None:
    """DeepSpeedZeRoOffload.__init__ takes its dtype from the first parameter, or from a placeholder of ours."""
    assert "list(module.parameters())[0].dtype" in inspect.getsource(undecorated(DeepSpeedZeRoOffload.__init__))


@pytest.mark.seam("a training after the process groups were destroyed")
def test_deepspeed_keeps_its_groups_until_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeed.utils.groups returns _WORLD_GROUP without a check until _release_process_group_references."""
    stale = object()
    monkeypatch.setattr(groups, "_WORLD_GROUP", stale)
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True)
    assert groups._get_data_parallel_group() is stale, "DeepSpeed itself notices that its group has ended"
    groups._release_process_group_references()
    assert groups._WORLD_GROUP is None, "a fit after destroy_process_group would use the ended group"


@pytest.mark.seam("every write reaches storage, by StateByParameter")
def test_every_writer_of_state_is_overridden() -> None:
    """Every method that gets a partition to write to it (``release_swap_buffers=False``) is overridden."""
    writers = {
        name
        for name, member in inspect.getmembers(DeepSpeedZeroOptimizer_Stage3, inspect.isfunction)
        if "release_swap_buffers=False" in inspect.getsource(member)
    }
    assert writers and writers <= overridden(StorageOptimizer, DeepSpeedZeroOptimizer_Stage3)


@pytest.mark.seam("SmartInfinityStrategy loads full weights")
def test_lightning_restores_full_weights_by_the_overridden_hook() -> None:
    """load_full_weights ends in DeepSpeedStrategy._restore_zero_state with the value that load_checkpoint returned."""
    strategy = mock.MagicMock(load_full_weights=True, zero_stage_3=True)
    DeepSpeedStrategy.load_model_state_dict(strategy, {"state_dict": {}}, strict=False)
    strategy._restore_zero_state.assert_called_once_with({"state_dict": {}}, strict=False)


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
    strategy = mock.MagicMock(model=pl.LightningModule(), lightning_module=mock.MagicMock())
    strategy.lightning_module.trainer.training = training
    DeepSpeedStrategy.init_deepspeed(strategy)
    called = [name for name, *_ in strategy.method_calls if not name.startswith("lightning_module.")]
    assert called == [f"_initialize_deepspeed_{call}"], "what stock does beside it is left out in ours"


# ---- names that are read of DeepSpeed, torch and Lightning, and not overridden


@pytest.mark.seam("check_zero_section refuses wrong keys before the set-up, when DeepSpeed may not be imported yet")
def test_zero_section_has_the_fields_that_are_read() -> None:
    """deepspeed.runtime.zero.config parses the section zero_optimization into fields, and forbids unknown keys.

    Our lists have every key of it and of its offload_param and leaf_module, and no others.
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
    child._load_from_state_dict(weights, "0.", metadata["0"], True, missing, unexpected, errors)
    assert (missing, unexpected, errors) == ([], [], [])
    assert_equal(module.state_dict(), weights)


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
        with warnings.catch_warnings(record=True, action="always") as caught:
            scheduler.step()
        assert bool(caught) != stepped, "every training with a scheduler would warn"


@pytest.mark.seam("gradients are used in the right order of streams")
def test_accelerator_says_how_its_streams_behave() -> None:
    """On a CPU nothing runs in parallel to the caller: is_synchronized_device and resolves_data_dependency are true."""
    assert get_accelerator().is_synchronized_device() is get_accelerator().resolves_data_dependency() is True


@pytest.mark.seam("replacing the stage-3 class leaves DeepSpeed's own subclass alone")
def test_stage3_is_imported_before_its_class_is_replaced() -> None:
    """deepspeed.runtime.superoffload.superoffload_stage3 subclasses the stage-3 optimizer at import."""
    from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

    assert SuperOffloadOptimizer_Stage3.__mro__[1] is DeepSpeedZeroOptimizer_Stage3


@pytest.mark.seam("refusing compiled wrappers")
def test_compiled_wrapper_has_its_name() -> None:
    """torch.compile of a module returns a torch._dynamo.eval_frame.OptimizedModule."""
    assert type(torch.compile(torch.nn.Linear(1, 1), backend="eager")) is torch._dynamo.eval_frame.OptimizedModule


@pytest.mark.seam("16-bit gradients are then held in fp32 from the start")
def test_accumulation_scheduler_says_whether_it_accumulates() -> None:
    """GradientAccumulationScheduler.going_to_accumulate_grad_batches returns whether it ever accumulates."""
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
    """_requires_distributed_sampler reads distributed_sampler_kwargs, and _get_distributed_sampler the DataLoader."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SmartInfinityFabricStrategy())
    loader = DataLoader(range(4), shuffle=shuffle)  # type: ignore[arg-type]
    assert not fabric._requires_distributed_sampler(loader)
    with mock.patch.object(SmartInfinityFabricStrategy, "distributed_sampler_kwargs", {}):
        assert fabric._requires_distributed_sampler(loader)
    assert fabric._get_distributed_sampler(loader, num_replicas=2, rank=0).shuffle == shuffle


@pytest.mark.seam("no_backward_sync without a warning")
def test_no_backward_sync_uses_the_strategys_control() -> None:
    """Fabric uses a _BackwardSyncControl in Strategy._backward_sync_control, and warns without one."""
    assert _BackwardSyncControl.__abstractmethods__ == {"no_backward_sync"}
    strategy = mock.MagicMock(spec=SmartInfinityFabricStrategy, _backward_sync_control=mock.MagicMock())
    fabric, module = mock.MagicMock(_strategy=strategy, strategy=strategy), torch.nn.Linear(1, 1)
    Fabric.no_backward_sync(fabric, _FabricModule(module, strategy))
    assert strategy._backward_sync_control.no_backward_sync.called, "every user of no_backward_sync would be warned"


@pytest.mark.seam("methods of TakenOptimizer use instance attributes only, as a wrapper inherits their class")
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
