"""What tensors without memory need of torch, and parameters that answer of DeepSpeed."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

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
    in_forward = len(Counted.calls)
    assert Counted.calls == ["aten.pow.Tensor_Scalar"]
    result.backward()
    assert len(Counted.calls) > in_forward


@pytest.mark.seam("autocast casts tensors without memory, and no ordinary tensor takes them as its data")
def test_a_tensor_without_memory_is_cast_by_autocast_and_is_nobodys_data() -> None:
    """Such a tensor has dispatch_device and _extra_dispatch_keys, a torch._C.DispatchKeySet of torch._C.DispatchKey."""
    cast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    tensor: Any = torch.Tensor._make_wrapper_subclass(
        Counted,
        (2, 2),
        dtype=torch.float32,
        device=torch.device("meta"),
        dispatch_device=True,
        _extra_dispatch_keys=cast,
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
    source = inspect.getsource(Init._convert_to_deepspeed_param)
    for name in ("ds_status", "all_gather", "all_gather_coalesced", "partition", "item"):
        assert f"param.{name} = " in source, name
    source = inspect.getsource(Init._zero_init_param)
    assert source.index("_convert_to_deepspeed_param") < source.index("param.partition()")
