"""Tests the private seams of DeepSpeed and torch that gradients, gathered parameters and saved tensors pass through."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import weakref
from typing import Any
from unittest import mock

import deepspeed.runtime.engine as engine
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init, register_external_parameter
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3, IPGBucketZ3
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.zero3.parameters.deepspeed_patches import GATHER_PARAMS, PARAMS_TO_RELEASE
from lightning_smartinfinity.zero3.parameters.live_parameters import RELEASE_PARAM
from tests.zero3.test_contract import assert_in_order, lacking, passed, undecorated


@pytest.mark.seam("GradientPath: a shared weight's gradient is added to the waiting one; gradients are reset once")
def test_a_gradient_in_a_bucket_is_a_view_of_it() -> None:
    """IPGBucketZ3 holds views of a waiting param.grad.data, which autograd adds to; reduce_and_partition_stream.

    DeepSpeedZeroOptimizer_Stage3.zero_grad looks at the parameters of fp16_groups alone, which ours hides.
    """
    _, _, adding = inspect.getsource(DeepSpeedZeroOptimizer_Stage3).partition("def __add_grad_to_ipg_bucket(")
    waiting = "self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())"
    for text in ("param.grad.data = new_grad_tensor", waiting):
        assert text in adding.partition("def __reduce_and_partition_ipg_grads(")[0]
    assert {field.name for field in dataclasses.fields(IPGBucketZ3)} >= {"params", "elements"}
    resetting = inspect.getsource(undecorated(DeepSpeedZeroOptimizer_Stage3.zero_grad))
    assert re.findall(r"^\s*for (.*):$", resetting, re.MULTILINE) == ["group in self.fp16_groups", "p in group"]


@pytest.mark.seam("GradientPath bypasses buckets in one process")
def test_buckets_do_nothing_to_gradients_in_one_process_but_round_them() -> None:
    """Buckets round gradients to the dtypes that are keys of ipg_buckets (ds_grad_is_ready, partition_grads).

    reduce_scatter_coalesced divides by the number of processes, which is one here.
    """
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3.reduce_independent_p_g_buckets_and_remove_grads)
    assert 'getattr(param, "ds_grad_is_ready", True)' in source, "gradients that are not complete would leave"
    assert source.count("(param)") == 5, "something new is done to a gradient on its way into the bucket"
    reducing = vars(DeepSpeedZeroOptimizer_Stage3)["_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"]
    assert lacking(reducing, "self.partition_grads(params_in_bucket, grad_partitions)") == []
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    assert "IPGBucketZ3() for dtype in comm_dtypes" in source, "buckets of another dtype would not be noticed"
    gradient = torch.tensor([1.0, -0.0, 1e-40, math.inf])
    with (
        mock.patch.object(coalesced_collectives.dist, "get_world_size", return_value=1),
        mock.patch.object(coalesced_collectives.dist, "get_rank", return_value=0),
        mock.patch.object(coalesced_collectives, "_torch_reduce_scatter_fn"),
    ):
        (reduced,) = reduce_scatter_coalesced([gradient.clone()])
    assert torch.equal(reduced.view(torch.int32), gradient.view(torch.int32))


@pytest.mark.seam("checking within backward whether the graph is retained")
def test_autograd_returns_whether_its_graph_is_retained() -> None:
    """torch._C._autograd._get_current_graph_task_keep_graph is true for retain_graph and for create_graph."""
    seen = []

    class Noticing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(torch._C._autograd._get_current_graph_task_keep_graph())
            return gradient * 2

    x = torch.ones(1, requires_grad=True)
    loss = Noticing.apply(x).square()
    torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(loss, x, create_graph=True)
    loss.backward()
    assert seen == [True, True, False]


@pytest.mark.seam(
    "parameters used later are gathered", "A module has _external_params (pre_sub_module_forward_function)."
)
@pytest.mark.seam("time that grows with the modules, not with their square")
def test_the_order_of_gathering_can_be_learnt_anew() -> None:
    """get_param_coordinator of DeepSpeedZeRoOffload has is_complete_trace and _invalidate_trace.

    PartitionedParameterCoordinator.reset_step makes __submodule_order a tuple, which each module slices.
    """
    coordinator = PartitionedParameterCoordinator
    assert "_external_params" in inspect.getsource(register_external_parameter), "late uses would go unseen"
    assert passed(coordinator._invalidate_trace) == passed(coordinator.is_complete_trace) == ["self"]
    hooks = ("self.pre_sub_module_forward_function(", "self.pre_sub_module_backward_function(")
    assert lacking(DeepSpeedZeRoOffload._register_deepspeed_module, *hooks) == []
    assert "get_param_coordinator()" in inspect.getsource(DeepSpeedZeRoOffload.pre_sub_module_forward_function)
    sliced = "for module in self.__submodule_order[step_id:]:"
    assert lacking(coordinator, "self.__submodule_order = tuple(self.__submodule_order)", sliced) == []
    assert callable(coordinator.reset_step)


@pytest.mark.seam("`read_trace_lazily`: a model is freed after its training")
def test_parameters_to_release_are_cached_by_the_class() -> None:
    """PartitionedParameterCoordinator has `__params_to_release(self, submodule_to_release, step_id)`.

    instrument_w_nvtx holds it as `func`, in a functools.cache.
    """
    cached = inspect.getclosurevars(vars(PartitionedParameterCoordinator)[PARAMS_TO_RELEASE]).nonlocals["func"]
    assert cached.cache_parameters()["maxsize"] is None
    assert passed(cached.__wrapped__) == ["self", "submodule_to_release", "step_id"]


@pytest.mark.seam("`keep_statistics` keeps statistics in fp32")
@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
def test_norms_take_16_bit_inputs_with_fp32_weights(kind: Any) -> None:
    """Norms take 16-bit inputs with fp32 weights, running_mean, running_var (_buffers); __dict__ hides _parameters."""
    norm = kind(2, affine=True, track_running_stats=True).bfloat16()
    statistics = {name: buffer.float() for name, buffer in norm._buffers.items() if name.startswith("running_")}
    assert list(statistics) == ["running_mean", "running_var"]
    norm._buffers.update(statistics)
    for name, param in norm._parameters.items():
        vars(norm)[name] = param.float()
    output = norm(torch.ones(2, 2, 3, dtype=torch.bfloat16))
    output.sum().backward()
    assert output.dtype is norm._parameters["bias"].grad.dtype is torch.bfloat16
    assert norm.running_mean.dtype is torch.float32 and bool((norm.running_mean != 0).all())


@pytest.mark.seam("`Trainer(sync_batchnorm=True)`")
def test_lightning_synchronizes_layers_when_a_fit_is_set_up() -> None:
    """The Trainer sets ParallelStrategy._layer_sync; DDP converts each torch.nn.modules.batchnorm._BatchNorm first."""
    assert "self.strategy._layer_sync = self._layer_sync" in inspect.getsource(_AcceleratorConnector)
    assert_in_order(DDPStrategy.setup, "self.model = self._layer_sync.apply(self.model)", "convert_module")
    assert isinstance(torch.nn.SyncBatchNorm(2), torch.nn.modules.batchnorm._BatchNorm)


@pytest.mark.seam("guard_modules refuses torch.func's transforms, which would end the process; check_model, scripts")
def test_torch_reports_transforms_and_modules_without_hooks() -> None:
    """torch._C._functorch.maybe_current_level is not None in transforms; torch.jit.TopLevelTracedModule takes hooks."""
    levels: list[object] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        levels.append(torch._C._functorch.maybe_current_level())
        return x.sum()

    noting(torch.ones(2))
    torch.func.grad(noting)(torch.ones(2))
    torch.func.vmap(noting)(torch.ones(2, 2))
    assert levels[0] is None and None not in levels[1:] and len(levels) == 3
    layer = torch.nn.Linear(2, 2)
    traced, scripted = torch.jit.trace(layer, torch.ones(1, 2)), torch.jit.script(layer)
    assert isinstance(traced, torch.jit.TopLevelTracedModule) and not isinstance(scripted, type(traced))
    traced.register_forward_pre_hook(print)
    with pytest.raises(RuntimeError, match="not supported on ScriptModules"):
        scripted.register_forward_pre_hook(print)


# ---- the seams through which an update may run during forward: whatever uses a parameter asks for it first


COORDINATOR = inspect.getsource(PartitionedParameterCoordinator)


@pytest.mark.seam("UpdateInFlight gathers parameters only after their update, and with a budget only once")
def test_parameters_are_gathered_by_two_methods_of_their_own() -> None:
    """zero.Init sets all_gather and all_gather_coalesced on the parameter; they take what they gather first.

    They alone call _ensure_availability_of_partitioned_params and _all_gather, also in GatheredParameters. With
    allgather_sequential, each parameter is gathered into its own memory, not copied out of a common one.
    """
    missing = lacking(
        Init._convert_to_deepspeed_param,
        "def all_gather(param_list=None, async_op=False, hierarchy=0):",
        "def all_gather_coalesced(params: Iterable[Parameter],",
        "param.all_gather = all_gather\n",
        "param.all_gather_coalesced = all_gather_coalesced\n",
        "if self.allgather_sequential or len(params) == 1:\n                return _all_gather_sequential(",
        "param.data = param_buffer.narrow(0, 0, param.ds_numel).view(param.ds_shape).to(param.device)",
    )
    assert missing == []
    taking = "self._ensure_availability_of_partitioned_params("
    source, convert = map(inspect.getsource, (partition_parameters, Init._convert_to_deepspeed_param))
    assert [each.count(taking) for each in (source, convert)] == [2, 1]
    assert convert.count("self._all_gather(") == source.count("self._all_gather(") == 1
    assert lacking(partition_parameters.GatheredParameters, "self.params[0].all_gather(param_list=self.params)") == []


@pytest.mark.seam("`skip_in_prefetch`: a parameter that awaits its update is gathered when it is used, not ahead")
def test_the_coordinator_gathers_what_is_needed_and_what_is_next_by_one_method() -> None:
    """PartitionedParameterCoordinator.fetch_sub_module calls its __all_gather_params for a module, then ahead.

    It gathers by each parameter's ds_status, not by its notes on what was gathered ahead.
    """
    assert passed(vars(PartitionedParameterCoordinator)[GATHER_PARAMS]) == ["self", "params", "forward"]
    assert passed(PartitionedParameterCoordinator.fetch_sub_module) == ["self", "current_submodule", "forward"]
    calls = re.findall(r"self\.__all_gather_params\((.*)\)", COORDINATOR)
    assert calls == ["params_to_fetch, forward", "params_to_prefetch, forward"]
    assert COORDINATOR.count(".all_gather_coalesced(") == 1
    missing = lacking(
        PartitionedParameterCoordinator,
        "params_to_fetch = set(iter_params(current_submodule, recurse=is_leaf))",
        "if p.ds_status == ZeroParamStatus.NOT_AVAILABLE])",
        "if param.ds_status == ZeroParamStatus.NOT_AVAILABLE:\n                partitioned_params.append",
    )
    assert missing == []


@pytest.mark.seam("Speculation updates what no module uses; parameters gathered ahead are released for the next module")
def test_a_gathered_parameter_can_be_released_before_its_module_is_done_waiting_for_it() -> None:
    """__release_param spares what a module computes with; ds_inflight_param_registry has what is in flight.

    release_sub_module takes a module out of ds_active_sub_modules, whether the parameter stays gathered or not.
    """
    coordinator, registry = PartitionedParameterCoordinator, "self.__inflight_param_registry"
    assert lacking(coordinator.release_sub_module, "param.ds_active_sub_modules.discard(submodule.ds_id)") == []
    release = "def __release_param(self, param: Parameter, free_data: bool = True)"
    spares = "if param.ds_status == ZeroParamStatus.AVAILABLE and not param.ds_active_sub_modules:"
    assert lacking(getattr(coordinator, RELEASE_PARAM), release, spares) == []
    assert f"{registry}.pop(param).wait()" in COORDINATOR
    given = (f"{registry} = module.ds_inflight_param_registry", f"inflight_param_registry={registry}")
    assert lacking(DeepSpeedZeRoOffload.__init__, *given) == []


@pytest.mark.seam("a parameter that still has to be updated is read when it is used")
def test_parameters_are_read_ahead_from_storage_in_the_background_only() -> None:
    """A swapper's swap_in with async_op, which reads ahead, does not wait: a gather reads what is still on storage."""
    assert "nvme_swapper.swap_in(swap_in_params, async_op=True)" in COORDINATOR
    assert "nvme_swapper.swap_in(swap_in_list, async_op=False)" in inspect.getsource(
        Init._ensure_availability_of_partitioned_params
    )


@pytest.mark.seam("a step does not wait for small parameters of the whole model")
def test_persistent_parameters_are_gathered_by_the_optimizer_in_two_places() -> None:
    """DeepSpeedZeroOptimizer_Stage3 gathers persistent_parameters (empty unless overlap is none) in two places."""
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    used = {
        name
        for name, member in inspect.getmembers(DeepSpeedZeroOptimizer_Stage3, inspect.isfunction)
        if "self.persistent_parameters[0].all_gather(self.persistent_parameters)"
        in inspect.getsource(undecorated(member))
    }
    # load_state_dict only mentions it in a comment.
    assert used == {"_post_step", "checkpoint_event_epilogue", "load_state_dict"}
    assert source.count("if len(self.persistent_parameters) > 0:") == 3


@pytest.mark.seam("StorageOptimizer finishes the update before a checkpoint is saved or loaded")
def test_checkpoints_begin_with_an_event() -> None:
    """The engine's save_checkpoint and load_checkpoint call checkpoint_event_prologue before anything else."""
    for method in (engine.DeepSpeedEngine.save_checkpoint, engine.DeepSpeedEngine.load_checkpoint):
        assert lacking(method, "checkpoint_event_prologue()") == []


@pytest.mark.seam("SmartInfinityStrategy: if the answer is wrong, the update is discarded and made again")
def test_lightning_tells_the_strategy_of_a_backward_and_knows_whether_a_step_follows() -> None:
    """Lightning's backward calls Strategy.pre_backward; _FitLoop._should_accumulate returns whether a step follows."""
    assert "self.pre_backward(closure_loss)" in inspect.getsource(Strategy.backward)
    assert (passed(Strategy.pre_backward), passed(_FitLoop._should_accumulate)) == (["self", "closure_loss"], ["self"])


# ---- torch's autograd and DeepSpeed's checkpoints of activations, on which activations on storage rely


@pytest.mark.seam("views of parameters pass through")
def test_a_view_knows_its_base() -> None:
    """A product with a transposed weight saves a view, whose Tensor._base is that parameter."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        torch.ones(4, 3, requires_grad=True) @ weight.t()
    assert any(tensor is not weight and tensor._base is weight for tensor in saved) and torch.ones(2)._base is None


@pytest.mark.seam("`Packing` leaves tensors saved within backward in memory")
def test_autograd_tells_whether_it_runs_a_graph() -> None:
    """torch._C._current_graph_task_id is -1 outside of backward, and not in a recomputation within it."""
    seen: list[int] = []

    def body(value: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._current_graph_task_id())
        return value.exp()

    value = torch.ones(2, requires_grad=True)
    checkpoint(body, value, use_reentrant=False).sum().backward()
    assert seen[0] == -1 and seen[1] >= 0 and torch._C._current_graph_task_id() == -1


@pytest.mark.seam("a pause for code, as torch.func, that refuses hooks", "_push_saved_tensors_default_hooks.")
def test_hooks_can_be_set_aside_and_put_back() -> None:
    """torch._C._autograd has _top_saved_tensors_default_hooks and _pop_saved_tensors_default_hooks of a stack."""
    packed: list[torch.Tensor] = []
    pack, unpack = packed.append, packed.pop  # of which the second is never called
    autograd = torch._C._autograd
    assert autograd._top_saved_tensors_default_hooks(True) is None
    value = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        assert autograd._top_saved_tensors_default_hooks(True) == (pack, unpack)
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(lambda each: each.exp().sum())(torch.ones(2))
        autograd._pop_saved_tensors_default_hooks()
        value.exp()
        torch.func.grad(lambda each: each.exp().sum())(torch.ones(2))
        assert packed == []
        autograd._push_saved_tensors_default_hooks(pack, unpack)
        value.exp()
    assert len(packed) == 1 and autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.seam("change_error, Packing: changes in place are noticed, also within backward")
def test_changes_are_counted_for_all_views_and_the_count_can_be_set() -> None:
    """An alias without memory shares Tensor._version; _unsafe_set_version_counter of torch._C._autograd sets it.

    Autograd gives the unpacked tensor the _version of what a hook returned.
    """
    tensor = torch.ones(4)
    alias, other = tensor.detach(), tensor.clone()
    alias.data = torch.empty(0)
    assert alias.untyped_storage().nbytes() == 0
    tensor.add_(1)
    assert (tensor._version, alias._version, other._version) == (1, 1, 0)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (7,))
    assert (tensor._version, alias._version, other._version) == (7, 7, 0)
    alias.data = torch.ones(4)
    alias.add_(1)
    assert (tensor._version, alias._version, other._version) == (8, 8, 0)
    with saved_tensors_hooks(lambda tensor: None, lambda packed: other):
        node: Any = torch.ones(4, requires_grad=True).exp().grad_fn
    node._saved_result.add_(1)
    assert other._version == 1


@pytest.mark.seam("one `Entry` for each storage, and `Packing` determines whether offloading it frees memory")
def test_who_holds_the_memory_of_a_tensor_is_known() -> None:
    """torch._C._storage_Use_Count counts by UntypedStorage._cdata, and a weak reference ends with the last holder."""
    tensor = torch.ones(4)
    storage = tensor.untyped_storage()
    assert tensor.view(2, 2).untyped_storage()._cdata == storage._cdata
    alone = torch._C._storage_Use_Count(storage._cdata)
    view = tensor[1:]
    assert torch._C._storage_Use_Count(storage._cdata) == alone + 1
    weak = weakref.ref(storage)
    del tensor, storage
    assert weak() is view.untyped_storage()
    del view
    assert weak() is None


@pytest.mark.seam("`Packing` leaves tensors of the batch in memory")
def test_tensors_are_found_in_nested_containers() -> None:
    """torch.utils._pytree.tree_leaves goes through dictionaries, lists and tuples."""
    one, two = torch.ones(1), torch.ones(2)
    leaves = tree_leaves({"a": [one, {"b": (two, "text")}]})
    assert [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] == [one, two]


@pytest.mark.seam("open_activations reports that they are not offloaded")
def test_the_checkpoints_of_deepspeed_keep_their_inputs_themselves() -> None:
    """activation_checkpointing.checkpointing.CheckpointFunction.forward keeps ctx.deepspeed_saved_tensors, unhooked."""
    function = checkpointing.CheckpointFunction
    assert isinstance(vars(function)["forward"], staticmethod)
    assert passed(function.forward) == ["ctx", "run_function", "all_outputs", "args"]
    assert lacking(function.forward, "ctx.deepspeed_saved_tensors = ") == []
    packed: list[torch.Tensor] = []
    seen: list[object] = []

    def look(forward: Any, *inputs: object) -> Any:
        seen.extend(inputs[3:])
        return forward(*inputs)

    value = torch.ones(3, requires_grad=True)
    with (
        wrapped(function, "forward", look),
        saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor),
    ):
        checkpointing.checkpoint(torch.exp, value)
    assert seen == [value] and packed == []


@pytest.mark.seam("zeros that have no memory pass through")
def test_zeros_of_forward_mode_have_no_memory() -> None:
    """Tensor._is_zerotensor is true for zeros whose storage has a size, but no memory."""
    zeros = torch._efficientzerotensor((4,))  # type: ignore[attr-defined]
    assert zeros._is_zerotensor() and zeros.untyped_storage().nbytes() == 16
    with pytest.raises(RuntimeError):
        zeros.untyped_storage().data_ptr()
    assert not torch.zeros(4)._is_zerotensor()
