"""Tests which functions of the installed DeepSpeed and Lightning call which, and in what order, in a small training."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import (
    DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR,
    Init,
    ZeroParamStatus,
)
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import RESERVED_KEYS
from lightning_smartinfinity.zero3.optimizer.release import release_module
from tests.helpers.models import Recipe
from tests.helpers.plain import Everything
from tests.helpers.trainers import quiet_trainer
from tests.zero3.observed import Calls, observing
from tests.zero3.test_contract import undecorated

STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
OURS = "SmartInfinityOptimizer"
STEPPING = "StorageOptimizer"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Watched(Everything):
    """A module that notes what DeepSpeed has set on it in the middle of a forward pass."""

    def __init__(self) -> None:
        super().__init__(Recipe(epoch_batches=4, depth=1, scheduler="step"))
        self.in_forward: list[Any] = []
        self.stack: list[Any] = []
        norm: Any = self.model.norm
        norm.register_forward_pre_hook(self.look)

    def look(self, module: torch.nn.Module, _: Any) -> None:
        self.in_forward.append(getattr(module._parameters, "_in_forward", None))
        self.stack.append(self.model in parameter_offload.FWD_MODULE_STACK)


@dataclass
class Observed:
    """A finished training whose engine is still open."""

    calls: Calls
    module: Watched
    engine: Any
    param: Any
    depths: list[int]
    masters: list[torch.Tensor]
    model_states: Path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.calls, name)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """The record of a fit, writes from outside, a checkpoint, a resumed fit and a validation."""
    root, settings = tmp_path_factory.mktemp("observed"), {"limit_train_batches": 2, "limit_val_batches": 1}
    module, depths, masters = Watched(), [], []
    with observing() as calls:
        trainer = quiet_trainer(
            root, max_epochs=1, gradient_clip_val=1.0, callbacks=[GradientAccumulationScheduler({0: 1})], **settings
        )
        trainer.fit(module)
        engine: Any = trainer.strategy.model
        param: Any = module.model.norm.weight
        masters.append(safe_get_full_fp32_param(param))
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            depths.append(getattr(param, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR))
            param.data.fill_(2)
        masters.append(safe_get_full_fp32_param(param))
        safe_set_full_fp32_param(param, masters[0])
        safe_get_full_grad(param)
        trainer.save_checkpoint(root / "checkpoint")
        # Without overlap, small parameters stay gathered between steps.
        strategy = SmartInfinityStrategy(root / "resumed" / "storage", overlap="none")
        resumed = quiet_trainer(root / "resumed", strategy, max_epochs=2, **settings)
        resumed.fit(Watched(), ckpt_path=root / "checkpoint")
        resumed.validate(Watched(), ckpt_path=root / "checkpoint", verbose=False)
    (model_states,) = (root / "checkpoint" / "checkpoint").glob("*model_states.pt")
    yield Observed(calls, module, engine, param, depths, masters, model_states)
    for strategy in (trainer.strategy, resumed.strategy):
        strategy.close()  # type: ignore[attr-defined]


# ---- building the engine and the optimizer


def test_initialize_builds_the_engine_from_its_module_global(seen: Observed) -> None:
    """deepspeed.initialize looks DeepSpeedEngine up by its global name: ours can replace it (zero3/engine/build.py)."""
    assert seen.has("_build", "SmartInfinityEngine.__init__"), "stock engines would train instead of ours"
    assert seen.has("_build", "EvaluationEngine.__init__"), "stock engines would evaluate instead of ours"


def test_engine_imports_the_optimizer_class_at_call_time(seen: Observed) -> None:
    """_configure_zero_optimizer finds our subclass under the stage-3 class's name (zero3/engine/training.py)."""
    built = seen.callers(f"{STEPPING}.__init__")
    assert built == {"DeepSpeedEngine._configure_zero_optimizer"}, "the stock optimizer would keep state in memory"


def test_forward_ends_an_autocast_by_a_global() -> None:
    """An engine asks its module's name for what it does about an autocast (zero3/parameters/torch_functions.py)."""
    forward = undecorated(deepspeed.DeepSpeedEngine.forward)
    assert "autocast_if_enabled" in forward.__code__.co_names
    assert (
        "autocast_if_enabled" in forward.__globals__ and forward.__globals__["__name__"] == "deepspeed.runtime.engine"
    )


def test_engine_looks_for_duplicates_in_the_overridden_method(seen: Observed) -> None:
    """The engine calls our check before it builds the optimizer; the base's check is quadratic (training.py)."""
    looked = seen.callers("SmartInfinityEngine._check_for_duplicates")
    assert looked == {"DeepSpeedEngine._configure_optimizer"}, "ten thousand parameters would take seconds more"
    assert seen.in_order(
        "DeepSpeedEngine._configure_optimizer",
        "SmartInfinityEngine._check_for_duplicates",
        "SmartInfinityEngine._configure_zero_optimizer",
    )


def test_constructor_calls_the_overridden_setup(seen: Observed) -> None:
    """The base constructor builds partitions, calls our _setup_for_real_optimizer, then sets positions and hooks."""
    assert seen.in_order(
        f"{STAGE3}.__init__",
        f"{STAGE3}._create_fp16_partitions_with_defragmentation",
        f"{STEPPING}._setup_for_real_optimizer",
        f"{STAGE3}.set_grad_positions",
        f"{STAGE3}.create_reduce_and_remove_grad_hooks",
    ), "zero3/optimizer/storage_optimizer.py opens storage in _setup_for_real_optimizer, from partitions that are there"


def test_engine_names_parameters_and_hands_the_names_on(seen: Observed) -> None:
    """``param_names`` maps parameters to names, in the engine and in the optimizer that it builds."""
    names = {param: f"{name}" for name, param in seen.engine.module.named_parameters()}
    assert seen.engine.param_names == names, "names in checkpoints and messages (parameters/partition.py, engine.py)"
    assert seen.engine.optimizer.param_names == names


def test_optimizer_has_what_is_read_of_it(seen: Observed) -> None:
    """The stage-3 optimizer has attributes that describe its partition, its loss scale and its buckets."""
    optimizer = seen.engine.optimizer
    assert len(optimizer.fp16_groups) == len(optimizer.fp16_partitioned_groups_flat), "parameters/partition.py"
    assert set(optimizer.sub_group_to_group_id) == set(range(len(optimizer.fp16_groups))), "parameters/partition.py"
    assert optimizer.fp32_partitioned_groups_flat, "zero3/optimizer/storage_optimizer.py"
    for bucket in optimizer.ipg_buckets.values():
        assert bucket.params == [] and bucket.elements == 0, "zero_grad of gradient_path.py empties buckets"
    assert optimizer.reduce_bucket_size > 0 and optimizer.dtype is torch.bfloat16, (
        "zero3/optimizer/storage_optimizer.py"
    )
    assert optimizer.partition_count and optimizer.loss_scaler is not None, "formats/optimizer_state.py"
    assert optimizer.dynamic_loss_scale is False and optimizer.overflow is False, "formats/optimizer_state.py"
    assert optimizer.clip_grad == 1.0, (
        "integrations/precision.py sets it, zero3/optimizer/storage_optimizer.py reads it"
    )
    assert optimizer.dp_process_group is not None and optimizer._grad_acc_hooks is not None, "gradient_path.py"
    assert optimizer.reduce_and_partition_stream is not None or not torch.cuda.is_available(), "gradient_path.py"
    assert isinstance(optimizer.parameter_offload, parameter_offload.DeepSpeedZeRoOffload), "gradient_path.py"
    assert seen.engine._config is not None, "zero3/engine/training.py passes it to the checkpoint engine"


def test_parameters_have_what_is_read_of_them(seen: Observed) -> None:
    """zero.Init gives a parameter the attributes that this package reads."""
    param = seen.param
    assert (param.ds_numel, tuple(param.ds_shape)) == (32, (32,)), "parameters/partition.py, gather_on_use.py"
    assert param.partition_numel() == param.ds_tensor.numel() == param.ds_tensor.ds_numel == 32, (
        "parameters/partition.py"
    )
    assert isinstance(param.ds_id, int) and isinstance(param.ds_status, ZeroParamStatus), "parameters/gather_on_use.py"
    assert param.ds_process_group is not None and param.ds_summary()["shape"], "parameters/gather_on_use.py"
    assert param._z3_optimizer is seen.engine.optimizer, (
        "safe_get_* and zero3/optimizer/release.py find the training by it"
    )
    assert callable(param.all_gather) and callable(param.partition), "parameters/gather_on_use.py, outside_writes.py"


# ---- gradients and gathers


def test_gradients_pass_through_the_overridden_methods(seen: Observed) -> None:
    """Gradients come only from DeepSpeed's hooks, and in one process our methods lead them past the buckets."""
    hook = f"{STAGE3}.create_reduce_and_remove_grad_hooks.<locals>.wrapper.<locals>.reduce_partition_and_remove_grads"
    assert seen.callers("GradientPath.reduce_ready_partitions_and_remove_grads") == {hook}, "the arena would be empty"
    into_buckets = "GradientPath.reduce_independent_p_g_buckets_and_remove_grads"
    assert seen.callers(into_buckets) == {f"{STAGE3}.reduce_ready_partitions_and_remove_grads"}
    assert seen.callers(f"{STEPPING}.partition_grads") == {into_buckets}
    assert not seen.callers(f"{STAGE3}.__add_grad_to_ipg_bucket")


def test_parameters_gather_and_partition_through_their_init(seen: Observed) -> None:
    """The methods that zero.Init installs on parameters call Init's own, which gather_on_use.py replaces at times."""
    installed = "Init._convert_to_deepspeed_param.<locals>"
    assert seen.has(f"{installed}.all_gather", "Init._all_gather"), "a read of a new model would not be noticed"
    assert seen.has(f"{installed}.partition", "Init._partition"), "nor that it was partitioned again"
    for name in ("_all_gather", "_partition"):
        assert list(inspect.signature(undecorated(getattr(Init, name))).parameters)[1] == "param_list"
    assert list(inspect.signature(Init._post_init_method).parameters) == ["self", "module"]


def test_engine_ends_every_backward_in_the_optimizer(seen: Observed) -> None:
    """The engine's epilogue calls the optimizer's, where graphs that are no longer retained are released."""
    assert seen.callers(f"{STEPPING}.backward_epilogue") == {"DeepSpeedEngine._backward_epilogue"}
    assert seen.callers("SmartInfinityEngine.backward") == {"SmartInfinityPrecision.backward"}, (
        "retain_graph goes unseen"
    )


@pytest.mark.parametrize(
    ("ours", "hook"),
    [
        ("retrace_for_external_parameters.<locals>.learning.<locals>.gathering", "_run_before_backward_function"),
        (f"{STEPPING}._watch_releases.<locals>.releasing", "_run_after_backward_function"),
        ("guard_modules.<locals>.checked_again", "_post_forward_module_hook"),
    ],
)
def test_module_hooks_look_up_what_gathers_and_releases(seen: Observed, ours: str, hook: str) -> None:
    """Hooks call the offload's methods by name, so ours can wrap them.

    Ours are in external_parameters.py, module_guard.py, storage_optimizer.py and retained_graphs.py.
    """
    caller = f"DeepSpeedZeRoOffload._register_deepspeed_module.<locals>.{hook}"
    assert caller in seen.callers(ours), "parameters of retained graphs would be released"
    assert seen.has("guard_modules.<locals>.checked_again", "RetainedGraphs._unless_retained.<locals>.releasing")


def test_leftovers_of_backward_are_released_by_the_offload(seen: Observed) -> None:
    """The end of backward calls the method that we postpone while a graph is retained."""
    assert seen.has(f"{STAGE3}.backward_epilogue", "RetainedGraphs._unless_retained.<locals>.releasing")
    assert seen.has(
        "RetainedGraphs._unless_retained.<locals>.releasing", "DeepSpeedZeRoOffload.release_backward_leftovers"
    )


def test_active_modules_of_a_parameter_are_a_set(seen: Observed) -> None:
    """A parameter is released only when no module uses it; release.py clears that set after a broken step."""
    sets = [param.ds_active_sub_modules for param in seen.engine.module.parameters()]
    assert all(isinstance(users, set) and not users for users in sets), "abandoned parameters would stay gathered"


# ---- the step


@pytest.mark.parametrize(
    "verb", ["_pre_step", "_partition_all_parameters", "_loss_scale_update_and_overflow_cleanup", "_post_step"]
)
def test_step_calls_the_verbs_of_the_base(seen: Observed, verb: str) -> None:
    """The engine calls our step, which calls the base's verbs around an update (storage_optimizer.py)."""
    assert "DeepSpeedEngine._take_model_step" in seen.callers(f"{STEPPING}.step")
    caller = f"{STEPPING}.step"
    if verb == "_partition_all_parameters":
        assert seen.has(caller, f"{STEPPING}.{verb}")
        caller = f"{STEPPING}.{verb}"
    assert seen.has(caller, f"{STAGE3}.{verb}"), f"the step stands on {verb}"


# ---- hooks and marks on a module


def test_hooks_pass_each_input_and_output_through_a_function_of_the_module() -> None:
    """They look the functions up on the module, where those of parameters/module_values.py stand in their place."""
    source = inspect.getsource(parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module)
    for name, given in (("post_bwd_fn", "inputs"), ("pre_bwd_fn", "output")):
        assert re.search(rf"apply_to_tensors_only\(module\.{name}\.apply,\s+{given},", source), name
        assert f'"{name}" not in module.__dict__' in source


def test_hooks_after_a_forward_look_into_the_output(seen: Observed) -> None:
    """One hook of each module asks its output for attributes, or a dictionary for text keys; it returns nothing.

    The hook is reached through the offload's handles, and ours stands in its place (parameters/module_values.py).
    """
    offload, norm = seen.engine.optimizer.parameter_offload, seen.module.model.norm
    (number,) = {handle.id for handle in offload.forward_hooks} & norm._forward_hooks.keys()
    ours = norm._forward_hooks[number]
    for output, refused in ((1.0, TypeError), ({0: 1.0}, AttributeError)):
        parameter_offload.FWD_MODULE_STACK.append(norm)
        with pytest.raises(refused):
            ours.__wrapped__(norm, (), output)
        parameter_offload.FWD_MODULE_STACK.append(norm)
        assert ours(norm, (), output) is None, "what modules return would be replaced"
    parameter_offload.FWD_MODULE_STACK.append(norm)
    assert ours.__wrapped__(norm, (), []) is None


def test_hooks_of_deepspeed_can_be_told_by_their_module(seen: Observed) -> None:
    """Every hook of an engine is defined in a module of DeepSpeed; release.py removes those and no others."""
    owned = {
        name: [hook.__module__ for child in seen.module.modules() for hook in getattr(child, name).values()]
        for name in HOOKS
    }
    theirs = {name: [m for m in modules if m.startswith("deepspeed.")] for name, modules in owned.items()}
    assert theirs["_forward_pre_hooks"] and theirs["_forward_hooks"], "an engine leaves no hook of its own to be told"
    others = [m for modules in owned.values() for m in modules if not m.startswith(("deepspeed.", "lightning_smart"))]
    assert len(others) == 1, "beside the one of this test, and ours that wait for a call without an engine"
    release_module(seen.module)
    left = [
        hook.__module__ for child in seen.module.modules() for name in HOOKS for hook in getattr(child, name).values()
    ]
    left = [module for module in left if not module.startswith("lightning_smart")]
    assert left == [__name__], "a second fit of the module would run hooks of the first one's engine"


def test_a_forward_pass_marks_modules_where_the_marks_are_removed(seen: Observed) -> None:
    """In a forward pass modules are on a stack and their parameters marked; zero3/optimizer/release.py undoes both."""
    assert seen.module.in_forward and all(seen.module.in_forward), "after a broken forward whoever reads one gathers it"
    assert isinstance(parameter_offload.FWD_MODULE_STACK, list) and any(seen.module.stack)
    children = [child for child in seen.module.modules() if child._parameters]
    assert all(isinstance(child._parameters, parameter_offload.ZeROOrderedDict) for child in children)
    assert not any(child._parameters._in_forward for child in children)
    assert len(seen.engine.module.ds_inflight_param_registry) == 0, "gathers in flight are waited for there"


# ---- writes from outside


def test_writes_end_in_the_partition_method_of_the_first_parameter(seen: Observed) -> None:
    """GatheredParameters ends in param.partition, which ours wraps, so writes reach the master weights."""
    callers = {
        caller for caller in seen.callers("PartitionKeepingWrites.__call__") if caller.startswith("GatheredParameters.")
    }
    assert callers, "parameters/gather_methods.py would miss what is written in GatheredParameters"
    before, after = seen.masters
    assert (after == 2).all() and (before != 2).any(), "the masters on storage are those before the write"


def test_the_watched_partition_method_takes_what_the_original_takes(seen: Observed) -> None:
    """The ``partition`` of outside_writes.py has the parameters of the one that zero.Init installs."""
    original = inspect.signature(seen.param.partition.original).parameters.values()
    ours = list(inspect.signature(seen.param.partition).parameters.values())
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in original]


def test_gathered_parameters_are_marked(seen: Observed) -> None:
    """A parameter carries this mark inside GatheredParameters, and only there."""
    assert seen.depths == [1], "parameters/gather_methods.py would take it for one outside of GatheredParameters"
    assert getattr(seen.param, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0) == 0


def test_the_api_asks_the_optimizer_of_the_parameter(seen: Observed) -> None:
    """safe_get_* and safe_set_* end in the methods that state_by_parameter.py overrides."""
    assert seen.callers("StateByParameter.set_full_hp_param"), "safe_set_full_fp32_param would write into no master"
    assert seen.callers("StateByParameter._get_fp32_opt_state_partition"), "safe_get_full_fp32_param"
    assert seen.callers("StateByParameter.get_fp32_grad_for_param"), "safe_get_full_grad"


# ---- checkpoints


def test_every_rank_saves_two_files(seen: Observed) -> None:
    """The checkpoint engine saves model states, then optimizer states; its save is collective."""
    savers = ["DeepSpeedEngine._save_checkpoint", "DeepSpeedEngine._save_zero_checkpoint"]
    assert seen.callers("SmartInfinityCheckpointEngine.save") == set(savers), "save/checkpoint_engine.py would hang"
    assert seen.in_order("DeepSpeedEngine.save_checkpoint", *savers)
    assert seen.callers("SmartInfinityEngine._copy_recovery_script") == {"DeepSpeedEngine._save_zero_checkpoint"}, (
        "the scripts would be copied on rank 0 alone, outside of what is given up"
    )
    made = seen.callers("SmartInfinityCheckpointEngine.makedirs")
    assert made == {"DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine._create_checkpoint_file"}, (
        "folders would be made on rank 0 alone"
    )
    assert seen.callers("SmartInfinityEngine._configure_checkpointing") == {"DeepSpeedEngine.__init__"}


def test_the_optimizer_state_reaches_the_checkpoint_engine_as_it_was_described(seen: Observed) -> None:
    """DeepSpeed saves what formats/optimizer_state.py describes and hands it to the optimizer on loading."""
    assert seen.callers(f"{OURS}._rigid_state_dict") == {f"{STAGE3}.state_dict"}
    assert seen.has("DeepSpeedEngine._save_zero_checkpoint", f"{STAGE3}.state_dict")
    assert "DeepSpeedEngine._get_all_zero_checkpoint_state_dicts" in seen.callers("SmartInfinityCheckpointEngine.load")
    assert seen.callers(f"{OURS}._rigid_load_state_dict") == {f"{STAGE3}.load_state_dict"}


def test_names_and_shapes_of_parameters_lie_in_the_model_states(seen: Observed) -> None:
    """load/folder_check.py can compare names and shapes before anything is loaded."""
    assert seen.has("DeepSpeedEngine._common_checkpoint_state", "DeepSpeedEngine._get_zero_param_shapes")
    ((name, shape), *_) = seen.engine._get_zero_param_shapes()[0].items()
    assert name in dict(seen.engine.module.named_parameters()) and isinstance(shape, torch.Size)
    assert seen.engine._get_ckpt_name("folder", "tag").startswith(str(Path("folder", "tag")))


def test_names_in_deepspeeds_checkpoints_are_those_that_we_refuse(seen: Observed) -> None:
    """Every key that DeepSpeed saves beside the user's entries is reserved (formats/client_state.py)."""
    names = set(seen.engine._common_checkpoint_state({}, zero_optimizer_state=False, save_frozen_param=True))
    assert "module" in names
    assert names <= RESERVED_KEYS, "a user's entry of that name would be lost or replace DeepSpeed's"
    saved = set(torch.load(seen.model_states, weights_only=False, mmap=True))
    assert {"epoch", "loops"} <= saved - names, "what the user saves does not lie beside DeepSpeed's any more"
    assert saved & RESERVED_KEYS >= names


def test_engine_counts_steps_and_samples(seen: Observed) -> None:
    """The engine counts in attributes that are saved under their names; load/resharding.py sets them."""
    saved = torch.load(seen.model_states, weights_only=False, mmap=True)
    for name, count in {"global_steps": 2, "global_samples": 2, "skipped_steps": 0}.items():
        assert saved[name] == getattr(seen.engine, name) == count, name


def test_a_save_and_a_load_are_framed_by_the_optimizers_events(seen: Observed) -> None:
    """A save and a load partition all parameters first and gather the persistent ones last."""
    base, epilogue = f"{STAGE3}.checkpoint_event_prologue", f"{STAGE3}.checkpoint_event_epilogue"
    prologue = f"{OURS}.checkpoint_event_prologue"
    assert seen.in_order("DeepSpeedEngine.load_checkpoint", prologue, "DeepSpeedEngine._load_checkpoint", epilogue)
    assert seen.in_order("DeepSpeedEngine.save_checkpoint", prologue, "DeepSpeedEngine._save_checkpoint", epilogue)
    assert seen.has(base, f"{STEPPING}._partition_all_parameters"), "load/resharding.py would load into gathered ones"
    # Ours wraps the method that zero.Init installs (parameters/gather_methods.py).
    assert seen.has(epilogue, "GatherNow.__call__"), "zero3/optimizer/storage_optimizer.py, skipped step"
    assert seen.has("Gather._gather", "Init._convert_to_deepspeed_param.<locals>.all_gather")


# ---- Lightning's loops


def test_callbacks_are_complete_before_setup_environment_and_set_up_after_it(seen: Observed) -> None:
    """callback_support.py refuses callbacks in setup_environment, after configure_callbacks and before any acts."""
    assert seen.in_order(
        "Trainer._run",
        "_CallbackConnector._attach_model_callbacks",
        "SmartInfinityStrategy.setup_environment",
        "_call_setup_hook",
        "_call_configure_model",
    ), "refused callbacks would have acted, or be unknown yet"


def test_the_accumulation_scheduler_asks_its_trainer_for_the_strategy(seen: Observed) -> None:
    """The scheduler's check reads trainer.strategy in a method that is looked up on the instance."""
    assert seen.has("_call_callback_hooks", "_run_admitted"), "GradientAccumulationScheduler would raise again"
    assert seen.has("GradientAccumulationScheduler.on_train_start", "_AnyStrategy.__getattr__")


def test_on_train_start_is_the_last_hook_before_the_first_epoch(seen: Observed) -> None:
    """Random states are restored in the strategy's hook: after all others, and after the iterator was created."""
    assert seen.made_by("_FitLoop.on_run_start")[-1] == "_call_strategy_hook", "a hook draws after the restoration"
    assert seen.in_order(
        "_FitLoop.run", "_FitLoop.setup_data", "_FitLoop.reset", "_FitLoop.on_run_start", "_FitLoop.on_advance_start"
    )
    begin = "FitRecording.begin_fit"
    assert seen.has("SmartInfinityStrategy.on_train_start", begin) and seen.has(begin, "continue_epoch"), "not restored"


def test_set_up_of_training_and_evaluation_goes_through_the_overridden_hooks(seen: Observed) -> None:
    """DeepSpeedStrategy calls the methods that our strategy replaces, and our strategy calls those that it keeps."""
    train = "DeepSpeedStrategy._initialize_deepspeed_train"
    assert seen.has("SmartInfinityStrategy.init_deepspeed", train)
    for hook in ("_init_optimizers", "_setup_model_and_optimizer"):
        assert seen.callers(f"SmartInfinityStrategy.{hook}") == {train}, hook
    assert seen.has("SmartInfinityStrategy.init_deepspeed", "SmartInfinityStrategy._initialize_deepspeed_inference")
    assert seen.has("SmartInfinityStrategy.setup_distributed", "DeepSpeedStrategy._init_deepspeed_distributed")
    assert seen.callers("SmartInfinityStrategy._format_config"), (
        "gradient clipping and accumulation would be DeepSpeed's"
    )


def test_clipping_comes_after_the_closure_and_before_the_step(seen: Observed) -> None:
    """_after_closure calls _clip_gradients, in which integrations/precision.py clips, and the step follows."""
    step = "SmartInfinityEngine.step"
    assert seen.in_order("SmartInfinityPrecision.optimizer_step", "Precision._after_closure", step)
    assert seen.callers("DeepSpeedEngine.step") == {step}
    assert seen.callers("SmartInfinityPrecision._clip_gradients") == {"Precision._after_closure"}
    assert seen.callers("SmartInfinityPrecision.clip_gradients") == {"LightningModule.clip_gradients"}
