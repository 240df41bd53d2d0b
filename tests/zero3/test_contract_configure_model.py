"""Tests the private seams by which ZeRO-3 partitions models as they are built, and those of partitioned parameters."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_smartinfinity.zero3.parameters.gather_on_use import _OWN_REFERENCES, _is_unused
from lightning_smartinfinity.zero3.parameters.torch_functions import _LEFT, ScalarsAsBytes, sendable
from tests.helpers.runif import RunIf
from tests.zero3.test_contract import assert_in_order, lacking, passed


@pytest.mark.seam("tensors keep the dtype that the model asks for")
def test_dtypes_of_new_tensors_are_overridden_by_the_outermost_context() -> None:
    """DeepSpeedTensorOverride of top_level_context decides; _add_tensor_creation_wrappers wraps torch's functions."""
    assert partition_parameters.top_level_context is None
    asked = "if DeepSpeedTensorOverride.dtype in self.tensor_overrides:"
    wrapping = "torch.empty = zero_wrapper_for_fp_tensor_constructor(_orig_torch_empty,"
    assert lacking(Init._add_tensor_creation_wrappers, asked, wrapping) == []
    assert lacking(Init.__enter__, "top_level_context = self") == []


@pytest.mark.seam("nothing stays replaced", "torch.nn.functional.linear stays zero3_linear_wrap; zero_init_context.")
def test_what_init_replaces_in_torch() -> None:
    """zero.Init keeps _old_init, _old_init_subclass, _old_apply, __old_new__ of get_all_subclasses."""
    patch = inspect.getsource(Init.patch_init_and_builtins)
    assert set(re.findall(r"(\w+)\._old_init = ", patch)) == {"cls"}
    assert set(re.findall(r"(\w+\.(?:_old_|__old_)\w+) = ", patch)) == {
        *("cls._old_init", "cls._old_apply_of_skip_init_hook", "Tensor.__old_new__"),
        *("Module._old_init_subclass", "Module._old_apply"),
    }
    assert set(_LEFT[nn.Module]) == {"__init_subclass__", "_old_init_subclass", "_old_apply"}
    assert "torch.nn.functional.linear = zero3_linear_wrap" in inspect.getsource(Init._enable_mem_efficient_linear)
    assert "linear" not in inspect.getsource(Init.unpatch_init_and_builtins)
    assert partition_parameters.zero_init_context == 0
    assert nn.Linear in partition_parameters.get_all_subclasses(nn.Module)


@pytest.mark.seam("parameters that were not partitioned get the model's dtype", "Before, __check_params requires it.")
@pytest.mark.seam("progress, and memory that is returned at once")
def test_every_parameter_is_partitioned_by_one_method() -> None:
    """A constructor under zero.Init and an engine both call zero.Init._zero_init_param on the instance, the engine in
    DeepSpeedEngine._configure_distributed_model.
    """
    checking = "self.__check_params(self.module, check_dtype)"
    assert_in_order(DeepSpeedEngine._configure_distributed_model, "is_zero_init_model = ", checking)
    for caller in (Init._post_init_method, Init._convert_to_zero_parameters):
        assert lacking(caller, "self._zero_init_param(param)") == []
    assert passed(Init._zero_init_param) == ["self", "param"]


@pytest.mark.seam("ScalarsAsBytes, PartitionedParameter, SmartInfinityEngine: parameters without a dimension")
def test_parameters_are_sent_as_views_of_bytes() -> None:
    """zero.Init._zero_init_param, in its Module.apply, GatheredParameters._exit and DeepSpeedEngine._broadcast_model
    send a parameter as ``param.data.view(torch.uint8)``.
    """
    assert_in_order(Init._zero_init_param, "self._convert_to_deepspeed_param(param)", "param.data.view(torch.uint8)")
    for sender in (Init.patch_init_and_builtins, GatheredParameters._exit):
        assert lacking(sender, "data.view(torch.uint8)") == []
    assert inspect.getsource(DeepSpeedEngine._broadcast_model).count("p.data.view(torch.uint8)") == 2
    with pytest.raises(RuntimeError, match="cannot be 0 to view"):
        torch.ones(()).view(torch.uint8)
    with ScalarsAsBytes():
        assert torch.ones(()).view(torch.uint8).tolist() == [0, 0, 128, 63]
    data, of_deepspeed = torch.ones(()), SimpleNamespace(f_globals={"__name__": "deepspeed.runtime"})
    sendable(data, of_deepspeed).view(torch.uint8)[3] = 64
    assert data == 4 and sendable(data, of_deepspeed).view(-1).shape == (1,)


@pytest.mark.seam("a parameter is partitioned once nothing refers to its memory")
def test_references_to_the_memory_of_a_parameter_are_counted() -> None:
    """torch._C._storage_Use_Count of UntypedStorage._cdata counts parameter, storage object, views and arrays."""
    param = nn.Parameter(torch.randn(4, 3))
    assert torch._C._storage_Use_Count(param.untyped_storage()._cdata) == _OWN_REFERENCES
    aliases: list[Any] = [param[0], param.data, param.detach().numpy()]
    while aliases:
        assert not _is_unused(param)
        aliases.pop()
    assert _is_unused(param)


class Seen(TorchFunctionMode):
    """A mode that notes whether torch asked it."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked = True
        return func(*args, **(kwargs or {}))


@pytest.mark.seam("parameters are gathered when touched")
def test_modes_are_not_asked_about_two_ways_to_a_parameter() -> None:
    """``Parameter(other)`` and calls in torch._C.DisableTorchFunction reach no function mode; a copy_ does."""
    param, other = nn.Parameter(torch.randn(4, 3)), torch.zeros(4, 3)
    with Seen() as seen:
        nn.Parameter(param)
        assert not seen.asked
    with torch.no_grad(), torch._C.DisableTorchFunction(), Seen() as seen:
        param.add_(1)
        assert not seen.asked, "DisableTorchFunction holds for modes, too"
    with Seen() as seen:
        param.data.copy_(other)
        assert seen.asked


@pytest.mark.seam("pretrained weights", "PreTrainedModel.get_init_context, from_pretrained, no_init_weights.")
@RunIf(package="transformers")
def test_transformers_is_told_as_its_own_integration_is() -> None:
    """set_hf_deepspeed_config, _hf_deepspeed_config_weak_ref, modeling_utils.set_zero3_state announce ZeRO-3."""
    modeling: Any = import_module("transformers.modeling_utils")
    integration: Any = import_module("transformers.integrations.deepspeed")
    initialization: Any = import_module("transformers.initialization")
    for is_zero3 in (True, False):
        told = SimpleNamespace(is_zero3=lambda answer=is_zero3: answer, config={"told": is_zero3})
        with mock.patch.object(integration, "_hf_deepspeed_config_weak_ref", lambda told=told: told):
            assert integration.is_deepspeed_zero3_enabled() is is_zero3
            assert integration.deepspeed_config() == {"told": is_zero3}
    with modeling.set_zero3_state():
        assert modeling._is_ds_init_called is True
    assert modeling._is_ds_init_called is False
    model_class = modeling.PreTrainedModel
    assert "_is_ds_init_called" in inspect.getsource(model_class.from_pretrained)
    for name in ("get_init_context", "from_pretrained"):
        assert isinstance(model_class.__dict__[name], classmethod), name
    assert callable(initialization.no_init_weights)


@pytest.mark.seam("releasing_pages: files that weights are loaded from leave memory as they are read")
@RunIf(package="transformers")
def test_transformers_maps_files_by_one_function_and_loads_modules_one_by_one() -> None:
    """modeling_utils.load_state_dict maps each file, and Module._load_from_state_dict copies module by module."""
    modeling: Any = import_module("transformers.modeling_utils")
    integration: Any = import_module("transformers.integrations.deepspeed")
    assert re.search(r"load_state_dict\(\s*ckpt_file,", inspect.getsource(modeling))
    assert "module._load_from_state_dict(*args)" in inspect.getsource(integration._load_state_dict_into_zero3_model)


# ---- what tensors without memory need of torch, and parameters that answer of DeepSpeed


aten = torch.ops.aten


class Counted(torch.Tensor):
    """A tensor without memory that counts the operations on it."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(func))
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        return torch.zeros(2, 3, dtype=(kwargs or {}).get("dtype"))


@pytest.mark.seam("which operations are views, and what they change")
def test_an_operation_says_what_it_views_and_changes() -> None:
    """The _schema of an operator of torch has alias_info; names in _foreach_* change lists of tensors."""
    returned = {
        func: func._schema.returns[0].alias_info for func in (aten.t.default, aten.mul_.Tensor, aten.mul.Tensor)
    }
    assert returned[aten.t.default] is not None and not returned[aten.t.default].is_write
    assert returned[aten.mul_.Tensor].is_write and aten.mul_.Tensor._schema.is_mutable
    assert returned[aten.mul.Tensor] is None and not aten.mul.Tensor._schema.is_mutable
    assert [each.alias_info is not None for each in aten.mul.out._schema.arguments] == [False, False, True]
    assert aten._foreach_lerp_.Scalar._schema.name == "aten::_foreach_lerp_"


@pytest.mark.seam("tensors that stand for partitioned parameters")
def test_a_tensor_without_memory_has_a_shape_and_is_asked_for_each_operation() -> None:
    """Autograd keeps a tensor of torch.Tensor._make_wrapper_subclass for backward, and computes with it there."""
    Counted.calls.clear()
    tensor: Any = torch.Tensor._make_wrapper_subclass(Counted, (2, 3), dtype=torch.float32, requires_grad=True)
    assert tensor.shape == (2, 3) and tensor.stride() == (3, 1) and tensor.is_leaf
    result = tensor.pow(2).sum()
    assert Counted.calls == ["aten.pow.Tensor_Scalar"]
    result.backward()
    assert len(Counted.calls) > 1


@pytest.mark.seam("autocast casts tensors without memory, and no ordinary tensor takes them as its data")
def test_a_tensor_without_memory_is_cast_by_autocast_and_is_nobodys_data() -> None:
    """Such a tensor has dispatch_device and _extra_dispatch_keys, a torch._C.DispatchKeySet of torch._C.DispatchKey."""
    tensor: Any = torch.Tensor._make_wrapper_subclass(
        Counted,
        (2, 2),
        dtype=torch.float32,
        device=torch.device("meta"),
        dispatch_device=True,
        _extra_dispatch_keys=torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU),
    )
    Counted.calls.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(tensor, torch.ones(3, 2)).dtype is torch.bfloat16
    assert "prim.device.default" in Counted.calls and "aten._to_copy.default" in Counted.calls
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        torch.zeros(2, 3).data = tensor


@pytest.mark.seam("PartitionedParameter and PartitionedTensor: operations on gathered parameters cost nothing")
def test_a_parameter_class_without_a_function_of_its_own_breaks_no_graph() -> None:
    """torch._C._disabled_torch_function_impl and torch._C.DisableTorchFunctionSubclass cost torch nothing."""

    class Own(nn.Parameter):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    layer = nn.Linear(3, 3)
    for param in layer.parameters():
        param.__class__ = Own
    explained = torch._dynamo.explain(layer)(torch.ones(1, 3))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    with torch._C.DisableTorchFunctionSubclass():
        assert type(layer.weight + 1) is torch.Tensor


@pytest.mark.seam("a parameter has its shape until its gradient has arrived")
def test_backward_calls_back_at_its_end() -> None:
    """torch.autograd.Variable._execution_engine.queue_callback runs after the gradients of all leaves have arrived."""
    seen: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)

    class Queues(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append(leaf.grad is not None))
            return gradient

    Queues.apply(leaf).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [True]


@pytest.mark.seam("`Status` switches the parameter's class, for instance to PartitionedParameter")
def test_a_new_zero_parameter_has_the_attributes_that_are_replaced() -> None:
    """_convert_to_deepspeed_param sets ds_status, all_gather, all_gather_coalesced, ``partition``, ``item`` first."""
    names = ("ds_status", "all_gather", "all_gather_coalesced", "partition", "item")
    assert lacking(Init._convert_to_deepspeed_param, *(f"param.{name} = " for name in names)) == []
    assert_in_order(Init._zero_init_param, "_convert_to_deepspeed_param", "param.partition()")
