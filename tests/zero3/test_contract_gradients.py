"""The private seams of DeepSpeed and torch that gradients and gathered parameters pass through."""

from __future__ import annotations

import dataclasses
import inspect
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import register_external_parameter
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3, IPGBucketZ3


def test_a_gradient_in_a_bucket_is_a_view_of_it() -> None:
    """So what autograd adds to it while it waits is in the bucket; a second entry would fail an assertion."""
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3)
    adding = source[
        source.index("def __add_grad_to_ipg_bucket(") : source.index("def __reduce_and_partition_ipg_grads(")
    ]
    assert "param.grad.data = new_grad_tensor" in adding
    assert "self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())" in adding
    assert {field.name for field in dataclasses.fields(IPGBucketZ3)} >= {"params", "elements"}


def test_autograd_tells_whether_its_graph_is_retained() -> None:
    """From within a backward pass, for retain_graph and create_graph alike."""
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


def test_the_order_of_gathering_can_be_learnt_anew() -> None:
    """zero3/late_uses.py: uses of other modules' parameters are kept on the module, and the trace can be dropped."""
    coordinator = PartitionedParameterCoordinator
    assert "_external_params" in inspect.getsource(register_external_parameter), "late uses would go unseen"
    assert list(inspect.signature(coordinator._invalidate_trace).parameters) == ["self"]
    assert list(inspect.signature(coordinator.is_complete_trace).parameters) == ["self"]
    hooks = inspect.getsource(DeepSpeedZeRoOffload._register_deepspeed_module)
    assert "self.pre_sub_module_forward_function(" in hooks and "self.pre_sub_module_backward_function(" in hooks
    assert "get_param_coordinator()" in inspect.getsource(DeepSpeedZeRoOffload.pre_sub_module_forward_function)


def test_batch_norms_have_a_common_class() -> None:
    """Whose statistics zero3/engine.py casts: torch's kernels refuse fp32 ones beside weights in 16 bit."""
    norm = torch.nn.BatchNorm1d(2)
    assert isinstance(norm, torch.nn.modules.batchnorm._BatchNorm)
    assert {"running_mean", "running_var"} <= dict(norm.named_buffers()).keys()
