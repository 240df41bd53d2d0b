"""Tests which functions of the installed DeepSpeed and Lightning call which, and in what order, in a small training."""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import parameter_offload, stage3
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, Init, ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import RESERVED_KEYS
from lightning_smartinfinity.zero3.optimizer.release import release_module
from tests.helpers.models import Recipe
from tests.helpers.plain import Everything
from tests.helpers.trainers import quiet_trainer
from tests.zero3.test_contract import passed, undecorated

_WATCHED = ("deepspeed.", "lightning.", "lightning_smartinfinity.", "torch.optim.")
# Decorators: the function that they wrap counts as called by their caller.
_WRAPPERS = ("wrapped_fn", "decorate_context", "inner", "_fn", "wrapper")


class Calls:
    """Calls between functions of the watched packages, by qualified name (``Class.method``), in their order."""

    def __init__(self) -> None:
        self._made: list[tuple[int, str, str]] = []

    def note(self, invocation: int, caller: str, callee: str) -> None:
        self._made.append((invocation, caller, callee))

    def has(self, caller: str, callee: str) -> bool:
        """Return whether the first function was seen calling the second."""
        return any(call[1:] == (caller, callee) for call in self._made)

    def missing(self, *pairs: tuple[str, str]) -> list[tuple[str, str]]:
        """Return those pairs of which the first function was not seen calling the second."""
        return [pair for pair in pairs if not self.has(*pair)]

    def callers(self, callee: str) -> set[str]:
        """Return all functions that were seen calling it."""
        return {caller for _, caller, called in self._made if called == callee}

    def made_by(self, caller: str) -> list[str]:
        """Return what the first invocation of a function called, in order."""
        (first, *_) = [number for number, name, _ in self._made if name == caller] or [-1]
        return [callee for number, _, callee in self._made if number == first]

    def in_order(self, caller: str, *callees: str) -> bool:
        """Return whether the first invocation of a function called these, for the first time, in this order."""
        made = self.made_by(caller)
        return all(callee in made for callee in callees) and [*callees] == sorted(callees, key=made.index)


@contextmanager
def observing() -> Iterator[Calls]:
    """Note the calls that this thread makes."""
    calls = Calls()
    # The invocation number and the name of each running function, or None for a function that is not watched.
    stack: list[tuple[int, str] | None] = []
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event == "return":
            if stack:
                stack.pop()
        elif event == "call":
            code = frame.f_code
            if code.co_name in _WRAPPERS:
                stack.append(stack[-1] if stack else None)
                return
            if not f"{frame.f_globals.get('__name__')}.".startswith(_WATCHED):
                stack.append(None)
                return
            if stack and stack[-1] is not None:
                calls.note(*stack[-1], code.co_qualname)
            count += 1
            stack.append((count, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)


# ---- a small training, and the calls in it


STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
OURS = "StorageOptimizer"
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


@pytest.mark.seam("building our engines")
@pytest.mark.seam("SmartInfinityEngine builds our optimizer")
def test_classes_are_looked_up_when_they_are_needed(seen: Observed) -> None:
    """deepspeed.initialize looks DeepSpeedEngine up by its global name, so ours can replace it, and
    DeepSpeedEngine._configure_zero_optimizer looks stage3.DeepSpeedZeroOptimizer_Stage3 up when it is called.
    """
    built = seen.callers(f"{OURS}.__init__")
    assert built == {"DeepSpeedEngine._configure_zero_optimizer"}, "the stock optimizer would keep state in memory"
    engines = [("_build", f"{name}.__init__") for name in ("SmartInfinityEngine", "EvaluationEngine")]
    assert seen.missing(*engines) == [], "stock engines would train or evaluate instead of ours"


@pytest.mark.seam("an autocast around an engine's forward reaches into it")
def test_forward_ends_an_autocast_by_a_global() -> None:
    """DeepSpeedEngine.forward looks autocast_if_enabled up as a global of deepspeed.runtime.engine."""
    forward = undecorated(deepspeed.DeepSpeedEngine.forward)
    assert "autocast_if_enabled" in {*forward.__code__.co_names} & {*forward.__globals__}
    assert forward.__globals__["__name__"] == "deepspeed.runtime.engine"


@pytest.mark.seam("the same check in linear time")
def test_engine_looks_for_duplicates_in_the_overridden_method(seen: Observed) -> None:
    """DeepSpeedEngine calls our _check_for_duplicates before it builds the optimizer; the base's is quadratic."""
    looked = seen.callers("SmartInfinityEngine._check_for_duplicates")
    assert looked == {"DeepSpeedEngine._configure_optimizer"}, "ten thousand parameters would take seconds more"
    assert seen.in_order(
        "DeepSpeedEngine._configure_optimizer",
        "SmartInfinityEngine._check_for_duplicates",
        "SmartInfinityEngine._configure_zero_optimizer",
    )


@pytest.mark.seam("partitions exist when _setup_for_real_optimizer opens storage")
def test_constructor_calls_the_overridden_setup(seen: Observed) -> None:
    """DeepSpeedZeroOptimizer_Stage3 partitions, calls _setup_for_real_optimizer, then sets positions and hooks."""
    assert seen.in_order(
        f"{STAGE3}.__init__",
        f"{STAGE3}._create_fp16_partitions_with_defragmentation",
        f"{OURS}._setup_for_real_optimizer",
        f"{STAGE3}.set_grad_positions",
        f"{OURS}.create_reduce_and_remove_grad_hooks",
    ), "zero3/optimizer/storage_optimizer.py opens storage in _setup_for_real_optimizer, from partitions that are there"


@pytest.mark.seam("names on storage, in checkpoints and messages", "param_names maps parameters to names, in both.")
@pytest.mark.seam("load_resharded loads these counts", "They are saved under their names.")
@pytest.mark.seam("describe_partition, GradientPath, check_extra: the partition, buckets, checkpoints")
def test_optimizer_has_what_is_read_of_it(seen: Observed) -> None:
    """The optimizer has fp16_groups, fp16_partitioned_groups_flat, sub_group_to_group_id, ipg_buckets, loss_scaler,
    clip_grad, reduce_and_partition_stream, _grad_acc_hooks, parameter_offload and the like; DeepSpeedEngine has
    _config, global_steps, global_samples and skipped_steps.
    """
    optimizer = seen.engine.optimizer
    assert len(optimizer.fp16_groups) == len(optimizer.fp16_partitioned_groups_flat), "parameters/partition.py"
    assert set(optimizer.sub_group_to_group_id) == set(range(len(optimizer.fp16_groups))), "parameters/partition.py"
    assert optimizer.fp32_partitioned_groups_flat, "zero3/optimizer/storage_optimizer.py"
    for bucket in optimizer.ipg_buckets.values():
        assert bucket.params == [] and bucket.elements == 0, "zero_grad of gradient_path.py empties buckets"
    assert optimizer.reduce_bucket_size > 0, "zero3/optimizer/storage_optimizer.py"
    assert optimizer.partition_count and optimizer.loss_scaler is not None, "formats/optimizer_state.py"
    # integrations/precision.py sets clip_grad; zero3/optimizer/storage_optimizer.py and formats/ read all of them
    held = {"dtype": torch.bfloat16, "dynamic_loss_scale": False, "overflow": False, "clip_grad": 1.0}
    assert {name: getattr(optimizer, name) for name in held} == held
    assert None not in (optimizer.dp_process_group, optimizer._grad_acc_hooks), "gradient_path.py"
    assert optimizer.reduce_and_partition_stream is not None or not torch.cuda.is_available(), "gradient_path.py"
    assert isinstance(optimizer.parameter_offload, parameter_offload.DeepSpeedZeRoOffload), "gradient_path.py"
    assert seen.engine._config is not None, "zero3/engine/training.py passes it to the checkpoint engine"
    names = {param: f"{name}" for name, param in seen.engine.module.named_parameters()}
    assert seen.engine.param_names == optimizer.param_names == names, "parameters/partition.py, engine.py"
    saved = torch.load(seen.model_states, weights_only=False, mmap=True)
    for name, count in {"global_steps": 2, "global_samples": 2, "skipped_steps": 0}.items():
        assert saved[name] == getattr(seen.engine, name) == count, name


@pytest.mark.seam("release_module releases parameters after a step that was broken off")
@pytest.mark.seam("describe_partition, gathering_on_use, end_gathers; trainings_of finds trainings by _z3_optimizer")
def test_parameters_have_what_is_read_of_them(seen: Observed) -> None:
    """zero.Init sets ds_id, ds_numel, ds_shape, ds_status, ds_tensor, ds_process_group, ds_summary, partition_numel.

    A parameter is released only when no module uses it: ds_active_sub_modules is the set of those that do.
    """
    param = seen.param
    numels = (
        param.ds_numel,
        *param.ds_shape,
        param.partition_numel(),
        param.ds_tensor.numel(),
        param.ds_tensor.ds_numel,
    )
    assert numels == (32,) * 5, "parameters/partition.py, gather_on_use.py"
    assert isinstance(param.ds_id, int) and isinstance(param.ds_status, ZeroParamStatus), "parameters/gather_on_use.py"
    assert param.ds_process_group is not None and param.ds_summary()["shape"], "parameters/gather_on_use.py"
    assert param._z3_optimizer is seen.engine.optimizer, (
        "safe_get_* and zero3/optimizer/release.py find the training by it"
    )
    assert callable(param.all_gather) and callable(param.partition), "parameters/gather_on_use.py, outside_writes.py"
    users = [param.ds_active_sub_modules for param in seen.engine.module.parameters()]
    assert all(isinstance(each, set) and not each for each in users), "abandoned parameters would stay gathered"


# ---- gradients and gathers


@pytest.mark.seam("gradients go into the arena; with one process they bypass the buckets")
def test_gradients_pass_through_the_overridden_methods(seen: Observed) -> None:
    """Hooks call reduce_ready_partitions_and_remove_grads, it reduce_independent_p_g_buckets_and_remove_grads."""
    hook = f"{STAGE3}.create_reduce_and_remove_grad_hooks.<locals>.wrapper.<locals>.reduce_partition_and_remove_grads"
    into_buckets = f"{OURS}.reduce_independent_p_g_buckets_and_remove_grads"
    expected = {
        f"{OURS}.reduce_ready_partitions_and_remove_grads": {hook},  # or the arena would be empty
        into_buckets: {f"{STAGE3}.reduce_ready_partitions_and_remove_grads"},
        "GradientPath.take": {into_buckets},
        f"{STAGE3}.__add_grad_to_ipg_bucket": set(),
    }
    assert {name: seen.callers(name) for name in expected} == expected


@pytest.mark.seam("gathering_on_use: code that touches a partitioned parameter finds it gathered")
def test_parameters_gather_and_partition_through_their_init(seen: Observed) -> None:
    """The methods that zero.Init installs on parameters call its _all_gather, _partition and _post_init_method."""
    installed = "Init._convert_to_deepspeed_param.<locals>"
    for name in ("all_gather", "partition"):
        assert seen.has(f"{installed}.{name}", f"Init._{name}"), "reads of a new model would go unnoticed"
        assert passed(getattr(Init, f"_{name}"))[1] == "param_list"
    assert passed(Init._post_init_method) == ["self", "module"]


@pytest.mark.seam("parameters stay gathered while a graph is retained")
@pytest.mark.seam("SmartInfinityEngine notices retained graphs, GradientPath releases their parameters at the end")
def test_engine_ends_every_backward_in_the_optimizer(seen: Observed) -> None:
    """DeepSpeedEngine.backward ends in _backward_epilogue, which calls the optimizer's backward_epilogue, which calls
    DeepSpeedZeRoOffload.release_backward_leftovers, which we postpone.
    """
    releasing = "RetainedGraphs._unless_retained.<locals>.releasing"
    leftovers = (releasing, "DeepSpeedZeRoOffload.release_backward_leftovers")
    assert seen.missing((f"{STAGE3}.backward_epilogue", releasing), leftovers) == []
    expected = {
        f"{OURS}.backward_epilogue": {"DeepSpeedEngine._backward_epilogue"},
        "SmartInfinityEngine.backward": {"SmartInfinityPrecision.backward"},  # or graphs go unseen
    }
    assert {name: seen.callers(name) for name in expected} == expected


@pytest.mark.seam("RetainedGraphs keeps parameters gathered, guard_modules refuses late ones")
@pytest.mark.parametrize(
    ("ours", "hook"),
    [
        ("retrace_for_external_parameters.<locals>.learning.<locals>.gathering", "_run_before_backward_function"),
        (f"{OURS}._watch_releases.<locals>.releasing", "_run_after_backward_function"),
        ("guard_modules.<locals>.checked_again", "_post_forward_module_hook"),
    ],
)
def test_module_hooks_look_up_what_gathers_and_releases(seen: Observed, ours: str, hook: str) -> None:
    """Hooks look pre_sub_module_backward_function, post_sub_module_backward_function and
    post_sub_module_forward_function up on the DeepSpeedZeRoOffload.
    """
    caller = f"DeepSpeedZeRoOffload._register_deepspeed_module.<locals>.{hook}"
    assert caller in seen.callers(ours), "parameters of retained graphs would be released"
    assert seen.has("guard_modules.<locals>.checked_again", "RetainedGraphs._unless_retained.<locals>.releasing")


# ---- the step


@pytest.mark.seam("taking the step on storage, between DeepSpeed's work before and after its own")
@pytest.mark.parametrize(
    "name", ["_pre_step", "_partition_all_parameters", "_loss_scale_update_and_overflow_cleanup", "_post_step"]
)
def test_step_calls_the_verbs_of_the_base(seen: Observed, name: str) -> None:
    """DeepSpeedEngine._take_model_step calls our step, which calls the base's verbs around an update."""
    assert "DeepSpeedEngine._take_model_step" in seen.callers(f"{OURS}.step")
    caller = f"{OURS}.step"
    if name == "_partition_all_parameters":
        assert seen.has(caller, f"{OURS}.{name}")
        caller = f"{OURS}.{name}"
    assert seen.has(caller, f"{STAGE3}.{name}"), f"the step stands on {name}"


# ---- hooks and marks on a module


@pytest.mark.seam("answer_values: these tensors answer", "By DeepSpeedZeRoOffload._register_deepspeed_module.")
def test_hooks_pass_each_input_and_output_through_a_function_of_the_module() -> None:
    """Hooks look pre_bwd_fn and post_bwd_fn up on the module, and call their ``apply`` for each tensor in and out."""
    source = inspect.getsource(parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module)
    for name, given in (("post_bwd_fn", "inputs"), ("pre_bwd_fn", "output")):
        assert re.search(rf"apply_to_tensors_only\(module\.{name}\.apply,\s+{given},", source), name
        assert f'"{name}" not in module.__dict__' in source


@pytest.mark.seam("accept_any_output: modules may return anything, as the hook's result is not used")
def test_hooks_after_a_forward_look_into_the_output(seen: Observed) -> None:
    """One hook of a module, in DeepSpeedZeRoOffload.forward_hooks and _forward_hooks, calls ``vars`` on the output."""
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


@pytest.mark.seam("`release_module` takes a module back from finished, failed and interrupted engines")
def test_hooks_of_deepspeed_can_be_told_by_their_module(seen: Observed) -> None:
    """Every hook of an engine is a function of a module named deepspeed.*, and no other hook of a module is."""
    owned = owners_of_hooks(seen.module)
    theirs = {name for name, owner in owned if owner.startswith("deepspeed.")}
    assert theirs >= {"_forward_pre_hooks", "_forward_hooks"}, "an engine leaves no hook of its own to be told"
    others = [owner for _, owner in owned if not owner.startswith(("deepspeed.", "lightning_smart"))]
    assert len(others) == 1, "beside the one of this test, and ours that wait for a call without an engine"
    release_module(seen.module)
    left = [owner for _, owner in owners_of_hooks(seen.module) if not owner.startswith("lightning_smart")]
    assert left == [__name__], "a second fit of the module would run hooks of the first one's engine"


def owners_of_hooks(module: torch.nn.Module) -> list[tuple[str, str]]:
    """Return the kind of each hook of a module and its children, and the module of its function."""
    found = [(name, hook) for child in module.modules() for name in HOOKS for hook in getattr(child, name).values()]
    return [(name, hook.__module__) for name, hook in found]


@pytest.mark.seam("release_module and end_gathers take a module back from finished, failed and interrupted engines")
def test_a_forward_pass_marks_modules_where_the_marks_are_removed(seen: Observed) -> None:
    """A forward sets FWD_MODULE_STACK, ZeROOrderedDict._in_forward of _parameters, ds_inflight_param_registry."""
    assert seen.module.in_forward and all(seen.module.in_forward), "after a broken forward whoever reads one gathers it"
    assert isinstance(parameter_offload.FWD_MODULE_STACK, list) and any(seen.module.stack)
    owned: list[Any] = [child._parameters for child in seen.module.modules() if child._parameters]
    assert {(type(each), each._in_forward) for each in owned} == {(parameter_offload.ZeROOrderedDict, False)}
    assert len(seen.engine.module.ds_inflight_param_registry) == 0, "gathers in flight are waited for there"


@pytest.mark.seam("hold_top_module_weakly: DeepSpeed's stack of modules holds no model whose training is over")
def test_the_stack_of_modules_is_read_at_its_end(seen: Observed) -> None:
    """An engine's set-up appends its module to FWD_MODULE_STACK. Hooks append, pop, iterate and read the item -1."""
    source = inspect.getsource(parameter_offload)
    assert set(re.findall(r"FWD_MODULE_STACK(\.\w+|\[[^]]*\])", source)) == {".append", ".pop", "[-1]"}
    assert "FWD_MODULE_STACK.append(self.module)" in source
    empty: Any = type(parameter_offload.FWD_MODULE_STACK)()
    with pytest.raises(IndexError):
        empty[-1]
    empty.top = weakref.ref(seen.engine.module)
    assert empty[-1] is seen.engine.module


@pytest.mark.seam("create_reduce_and_remove_grad_hooks: a training that is over is freed")
def test_hooks_of_gradients_are_registered_by_one_function(seen: Observed) -> None:
    """DeepSpeedZeroOptimizer_Stage3 calls `register_grad_hook(param, hook)` of its module for each parameter."""
    source = inspect.getsource(stage3.DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks)
    assert source.count("register_grad_hook(param, ") == source.count("register_grad_hook(") == 1
    trained = [param for param in seen.module.parameters() if param.requires_grad]
    assert len(seen.engine.optimizer._gradient_hooks) == len(trained) > 0


# ---- writes from outside


@pytest.mark.seam("refuse_foreign_steps, PartitionKeepingWrites: parameters are ordinary within GatheredParameters")
@pytest.mark.seam("PartitionKeepingWrites takes writes to parameters to the masters, and runs in its place")
def test_writes_end_in_the_partition_method_of_the_first_parameter(seen: Observed) -> None:
    """GatheredParameters ends in param.partition of the first parameter, which ours wraps, with its parameters.

    A parameter has DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR inside GatheredParameters, and only there.
    """
    partition = seen.param.partition
    assert {
        caller for caller in seen.callers("PartitionKeepingWrites.__call__") if caller.startswith("GatheredParameters.")
    }, "parameters/gather_methods.py would miss what is written in GatheredParameters"
    before, after = seen.masters
    assert (after == 2).all() and (before != 2).any(), "the masters on storage are those before the write"
    original, ours = (inspect.signature(each).parameters for each in (partition.original, partition))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in original.values()]
    assert seen.depths == [1], "parameters/gather_methods.py would take it for one outside of GatheredParameters"
    assert getattr(seen.param, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0) == 0


@pytest.mark.seam("StateByParameter: safe_get_*, safe_set_*")
def test_the_api_asks_the_optimizer_of_the_parameter(seen: Observed) -> None:
    """deepspeed.utils.tensor_fragment calls _z3_optimizer, so safe_get_* and safe_set_* end in our methods."""
    for method in ("set_full_hp_param", "_get_fp32_opt_state_partition", "get_fp32_grad_for_param"):
        assert seen.callers(f"{OURS}.{method}"), method  # or safe_set_full_fp32_param would write into no master


# ---- checkpoints


@pytest.mark.seam("SmartInfinityCheckpointEngine saves collectively; without it a save takes 12 bytes per parameter")
def test_every_rank_saves_two_files(seen: Observed) -> None:
    """Every rank calls DeepSpeedEngine.checkpoint_engine for model states, then for optimizer states."""
    savers = ["DeepSpeedEngine._save_checkpoint", "DeepSpeedEngine._save_zero_checkpoint"]
    assert seen.in_order("DeepSpeedEngine.save_checkpoint", *savers)
    making = {"DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine._create_checkpoint_file"}
    expected = {
        "SmartInfinityCheckpointEngine.save": {*savers},  # or our save would hang
        # Or the scripts would be copied, and folders made, on rank 0 alone, outside of what is given up.
        "SmartInfinityEngine._copy_recovery_script": {"DeepSpeedEngine._save_zero_checkpoint"},
        "SmartInfinityCheckpointEngine.makedirs": making,
        "SmartInfinityEngine._configure_checkpointing": {"DeepSpeedEngine.__init__"},
    }
    assert {name: seen.callers(name) for name in expected} == expected


@pytest.mark.seam("the checkpoint engine gets optimizer state as described, and returns it as it was read")
def test_the_optimizer_state_reaches_the_checkpoint_engine_as_it_was_described(seen: Observed) -> None:
    """_save_zero_checkpoint saves state_dict; _get_all_zero_checkpoint_state_dicts reads it for load_state_dict."""
    for verb in ("state_dict", "load_state_dict"):
        assert seen.callers(f"{OURS}._rigid_{verb}") == {f"{STAGE3}.{verb}"}
    loads = ("DeepSpeedEngine._get_all_zero_checkpoint_state_dicts", "SmartInfinityCheckpointEngine.load")
    assert seen.missing(("DeepSpeedEngine._save_zero_checkpoint", f"{STAGE3}.state_dict"), loads) == []


@pytest.mark.seam("comparing parameters before anything is loaded")
def test_names_and_shapes_of_parameters_lie_in_the_model_states(seen: Observed) -> None:
    """The file that _get_ckpt_name names has what _common_checkpoint_state and _get_zero_param_shapes return."""
    assert seen.has("DeepSpeedEngine._common_checkpoint_state", "DeepSpeedEngine._get_zero_param_shapes")
    ((name, shape), *_) = seen.engine._get_zero_param_shapes()[0].items()
    assert name in dict(seen.engine.module.named_parameters()) and isinstance(shape, torch.Size)
    assert seen.engine._get_ckpt_name("folder", "tag").startswith(str(Path("folder", "tag")))


@pytest.mark.seam("refuse_reserved refuses a user's keys that would replace DeepSpeed's")
def test_names_in_deepspeeds_checkpoints_are_those_that_we_refuse(seen: Observed) -> None:
    """DeepSpeedEngine._common_checkpoint_state has its keys, with which _save_checkpoint merges the user's."""
    names = set(seen.engine._common_checkpoint_state({}, zero_optimizer_state=False, save_frozen_param=True))
    assert {"module"} <= names <= RESERVED_KEYS, "a user's entry of that name would be lost or replace DeepSpeed's"
    saved = set(torch.load(seen.model_states, weights_only=False, mmap=True))
    assert {"epoch", "loops"} <= saved - names, "what the user saves does not lie beside DeepSpeed's any more"
    assert saved >= names


@pytest.mark.seam("StorageOptimizer and load_resharded gather persistent parameters after a skipped step, a load")
def test_a_save_and_a_load_are_framed_by_the_optimizers_events(seen: Observed) -> None:
    """checkpoint_event_prologue partitions all parameters, checkpoint_event_epilogue gathers the persistent ones."""
    base, epilogue = f"{STAGE3}.checkpoint_event_prologue", f"{STAGE3}.checkpoint_event_epilogue"
    prologue = f"{OURS}.checkpoint_event_prologue"
    assert seen.in_order("DeepSpeedEngine.load_checkpoint", prologue, "DeepSpeedEngine._load_checkpoint", epilogue)
    assert seen.in_order("DeepSpeedEngine.save_checkpoint", prologue, "DeepSpeedEngine._save_checkpoint", epilogue)
    # Or a load would fill gathered ones. Ours wraps the method that zero.Init installs (parameters/gather_methods.py).
    gathers = ("Gather._gather", "Init._convert_to_deepspeed_param.<locals>.all_gather")
    assert seen.missing((base, f"{OURS}._partition_all_parameters"), (epilogue, "GatherNow.__call__"), gathers) == []


# ---- Lightning's loops


@pytest.mark.seam("`adapt_callbacks` refuses callbacks before they act")
def test_callbacks_are_complete_before_setup_environment_and_set_up_after_it(seen: Observed) -> None:
    """Trainer._run attaches the model's callbacks, then calls setup_environment, and then sets callbacks up."""
    assert seen.in_order(
        "Trainer._run",
        "_CallbackConnector._attach_model_callbacks",
        "SmartInfinityStrategy.setup_environment",
        "_call_setup_hook",
        "_call_configure_model",
    ), "refused callbacks would have acted, or be unknown yet"


@pytest.mark.seam("callbacks: this one may run")
def test_the_accumulation_scheduler_checks_its_trainers_strategy(seen: Observed) -> None:
    """GradientAccumulationScheduler.on_train_start, looked up on the instance as hooks are, checks trainer.strategy."""
    asks = ("GradientAccumulationScheduler.on_train_start", "_AnyStrategy.__getattr__")
    assert seen.missing(("_call_callback_hooks", "_run_admitted"), asks) == [], "it would raise again"


@pytest.mark.seam("SmartInfinityStrategy restores RandomStates after every hook that only a start has")
def test_on_train_start_is_the_last_hook_before_the_first_epoch(seen: Observed) -> None:
    """_FitLoop.run: setup_data creates the first iterator, on_run_start ends with the strategy's on_train_start."""
    assert seen.made_by("_FitLoop.on_run_start")[-1] == "_call_strategy_hook", "a hook draws after the restoration"
    assert seen.in_order(
        "_FitLoop.run", "_FitLoop.setup_data", "_FitLoop.reset", "_FitLoop.on_run_start", "_FitLoop.on_advance_start"
    )
    begin = "TrainerFitRecord.begin_fit"
    assert seen.has("SmartInfinityStrategy.on_train_start", begin) and seen.has(begin, "restore"), "not restored"


@pytest.mark.seam("set-up of training and evaluation")
def test_set_up_of_training_and_evaluation_goes_through_the_overridden_hooks(seen: Observed) -> None:
    """_initialize_deepspeed_train calls the hooks that we replace; we call it and _init_deepspeed_distributed."""
    train, init_deepspeed = "DeepSpeedStrategy._initialize_deepspeed_train", "SmartInfinityStrategy.init_deepspeed"
    for hook in ("_init_optimizers", "_setup_model_and_optimizer"):
        assert seen.callers(f"SmartInfinityStrategy.{hook}") == {train}, hook
    missing = seen.missing(
        (init_deepspeed, train),
        (init_deepspeed, "SmartInfinityStrategy._initialize_deepspeed_inference"),
        ("SmartInfinityStrategy.setup_distributed", "DeepSpeedStrategy._init_deepspeed_distributed"),
    )
    assert missing == []
    assert seen.callers("SmartInfinityStrategy._format_config"), "DeepSpeed would clip and accumulate"


@pytest.mark.seam("the step itself clips by the norm")
def test_clipping_comes_after_the_closure_and_before_the_step(seen: Observed) -> None:
    """Precision._after_closure calls _clip_gradients, and the step follows."""
    precision, step, after = "SmartInfinityPrecision", "SmartInfinityEngine.step", "Precision._after_closure"
    assert seen.in_order(f"{precision}.optimizer_step", after, step)
    clipping = {
        f"{precision}._clip_gradients": {after},
        f"{precision}.clip_gradients": {"LightningModule.clip_gradients"},
    }
    expected = {"DeepSpeedEngine.step": {step}, **clipping}
    assert {name: seen.callers(name) for name in expected} == expected
