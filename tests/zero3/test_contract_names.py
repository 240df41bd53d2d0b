"""Private names that this package reads of DeepSpeed, torch and Lightning and that no override already holds."""

from __future__ import annotations

import inspect
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.runtime.engine as engine
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from lightning.pytorch.callbacks import GradientAccumulationScheduler


def test_active_modules_of_a_parameter_are_a_set() -> None:
    """A parameter is released only when no module uses it; what we clear after an abandoned step is that set."""
    assert "param.ds_active_sub_modules = set()" in inspect.getsource(partition_parameters)
    assert "ds_active_sub_modules.add(" in inspect.getsource(partitioned_param_coordinator)


def test_leftovers_of_backward_are_released_by_the_offload() -> None:
    """The method that is postponed while a graph is retained is the one that the end of backward calls."""
    assert callable(parameter_offload.DeepSpeedZeRoOffload.release_backward_leftovers)
    assert "self.parameter_offload.release_backward_leftovers()" in inspect.getsource(DeepSpeedZeroOptimizer_Stage3)


def test_fp32_state_is_gathered_from_a_parameter_and_its_slice() -> None:
    """The gather behind safe_get_full_* takes the parameter and the rank's padded fp32 slice."""
    gather = DeepSpeedZeroOptimizer_Stage3._fp32_state_allgather
    assert list(inspect.signature(gather).parameters) == ["self", "param", "fp32_state_partition"]


def test_engine_names_parameters_and_hands_the_names_on() -> None:
    """``param_names`` maps parameters to names, in the engine and in the optimizer that it builds."""
    source = inspect.getsource(engine.DeepSpeedEngine)
    assert "self.param_names = {param: name for name, param in model.named_parameters()}" in source
    assert "param_names" in inspect.signature(DeepSpeedZeroOptimizer_Stage3.__init__).parameters


def test_schedulers_ask_the_optimizer_whether_it_stepped() -> None:
    """A scheduler warns of stepping first by an attribute that our step has to set itself."""
    assert '"_opt_called"' in inspect.getsource(torch.optim.lr_scheduler.LRScheduler.step)


def test_accelerator_says_how_its_streams_behave() -> None:
    """On a CPU nothing runs beside the caller; the gradient path orders streams only where these say so."""
    assert get_accelerator().is_synchronized_device() is True
    assert get_accelerator().resolves_data_dependency() is True


def test_stage3_is_imported_before_its_class_is_replaced() -> None:
    """SuperOffload subclasses the stage-3 optimizer at import, so it is imported before that name is replaced."""
    from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

    assert SuperOffloadOptimizer_Stage3.__mro__[1] is DeepSpeedZeroOptimizer_Stage3


def test_compiled_wrapper_has_its_name() -> None:
    """``torch.compile`` of a module returns the wrapper that set-up refuses."""
    wrapped = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    assert type(wrapped) is torch._dynamo.eval_frame.OptimizedModule


def test_foreach_kernels_take_tensors_of_several_sizes() -> None:
    """Gradients of many parameters are copied and added by one call each, in any mixture of sizes."""
    targets, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    torch._foreach_copy_(targets, sources)
    torch._foreach_add_(targets, sources)
    assert [target.tolist() for target in targets] == [[2.0, 2.0], [4.0, 4.0, 4.0]]


def test_accumulation_scheduler_says_whether_it_accumulates() -> None:
    """In 16 bit the gradients of a schedule that accumulates at any time are held in fp32 from the start."""
    assert GradientAccumulationScheduler({0: 1, 4: 2}).going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({0: 1}).going_to_accumulate_grad_batches()
