"""Tests the seams through which an update may run during forward: whatever uses a parameter asks for it first."""

from __future__ import annotations

import inspect
import os
import re

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.runtime.engine as engine
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import Strategy

from lightning_smartinfinity.zero3.parameters.deepspeed_patches import GATHER_PARAMS
from lightning_smartinfinity.zero3.parameters.live_parameters import RELEASE_PARAM
from tests.zero3.test_contract import passed, undecorated

CONVERT = inspect.getsource(Init._convert_to_deepspeed_param)
COORDINATOR = inspect.getsource(PartitionedParameterCoordinator)


@pytest.mark.seam("UpdateInFlight lets parameters be gathered after their update only, and not twice with a budget")
def test_parameters_are_gathered_by_two_methods_of_their_own() -> None:
    """zero.Init sets all_gather and all_gather_coalesced on the parameter; they take what they gather first.

    They alone call _ensure_availability_of_partitioned_params and _all_gather, also in GatheredParameters. With
    allgather_sequential, each parameter is gathered into its own memory, not copied out of a common one.
    """
    assert "def all_gather(param_list=None, async_op=False, hierarchy=0):" in CONVERT
    assert "def all_gather_coalesced(params: Iterable[Parameter]," in CONVERT
    assert "param.all_gather = all_gather\n" in CONVERT
    assert "param.all_gather_coalesced = all_gather_coalesced\n" in CONVERT
    source = inspect.getsource(partition_parameters)
    assert source.count("self._ensure_availability_of_partitioned_params(") == 2
    assert CONVERT.count("self._ensure_availability_of_partitioned_params(") == 1
    assert CONVERT.count("self._all_gather(") == source.count("self._all_gather(") == 1
    gathering = inspect.getsource(partition_parameters.GatheredParameters)
    assert "self.params[0].all_gather(param_list=self.params)" in gathering
    assert (
        "if self.allgather_sequential or len(params) == 1:\n                return _all_gather_sequential(" in CONVERT
    )
    assert "param.data = param_buffer.narrow(0, 0, param.ds_numel).view(param.ds_shape).to(param.device)" in CONVERT


@pytest.mark.seam("`skip_in_prefetch`: a parameter that still has to be updated is gathered when it is used, not ahead")
def test_the_coordinator_gathers_what_is_needed_and_what_is_next_by_one_method() -> None:
    """PartitionedParameterCoordinator.fetch_sub_module calls its __all_gather_params for a module, then ahead.

    It gathers by each parameter's ds_status, not by its notes on what was gathered ahead.
    """
    assert GATHER_PARAMS in vars(PartitionedParameterCoordinator)
    assert passed(getattr(PartitionedParameterCoordinator, GATHER_PARAMS)) == ["self", "params", "forward"]
    assert passed(PartitionedParameterCoordinator.fetch_sub_module) == ["self", "current_submodule", "forward"]
    calls = re.findall(r"self\.__all_gather_params\((.*)\)", COORDINATOR)
    assert calls == ["params_to_fetch, forward", "params_to_prefetch, forward"]
    assert "params_to_fetch = set(iter_params(current_submodule, recurse=is_leaf))" in COORDINATOR
    assert COORDINATOR.count(".all_gather_coalesced(") == 1
    assert "if p.ds_status == ZeroParamStatus.NOT_AVAILABLE])" in COORDINATOR
    assert (
        "if param.ds_status == ZeroParamStatus.NOT_AVAILABLE:\n                partitioned_params.append" in COORDINATOR
    )


@pytest.mark.seam("Speculation updates what no module uses; what was gathered ahead makes room for the next module")
def test_a_gathered_parameter_can_be_released_before_its_module_is_done_waiting_for_it() -> None:
    """__release_param spares what a module computes with; ds_inflight_param_registry has what is in flight.

    release_sub_module takes a module out of ds_active_sub_modules, whether the parameter stays gathered or not.
    """
    ends = inspect.getsource(undecorated(PartitionedParameterCoordinator.release_sub_module))
    assert "param.ds_active_sub_modules.discard(submodule.ds_id)" in ends
    release = inspect.getsource(undecorated(getattr(PartitionedParameterCoordinator, RELEASE_PARAM)))
    assert "def __release_param(self, param: Parameter, free_data: bool = True)" in release
    assert "if param.ds_status == ZeroParamStatus.AVAILABLE and not param.ds_active_sub_modules:" in release
    assert "self.__inflight_param_registry.pop(param).wait()" in COORDINATOR
    offload = inspect.getsource(DeepSpeedZeRoOffload.__init__)
    assert "self.__inflight_param_registry = module.ds_inflight_param_registry" in offload
    assert "inflight_param_registry=self.__inflight_param_registry" in offload


@pytest.mark.seam("a parameter that still has to be updated is read when it is used")
def test_parameters_are_read_ahead_from_storage_in_the_background_only() -> None:
    """A swapper's swap_in with async_op, which reads ahead, does not wait: a gather reads what is still on storage."""
    assert "nvme_swapper.swap_in(swap_in_params, async_op=True)" in COORDINATOR
    assert "nvme_swapper.swap_in(swap_in_list, async_op=False)" in inspect.getsource(
        Init._ensure_availability_of_partitioned_params
    )


@pytest.mark.seam("a step does not wait for small parameters from all over the model")
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
    for method in ("save_checkpoint", "load_checkpoint"):
        source = inspect.getsource(getattr(engine.DeepSpeedEngine, method))
        assert "checkpoint_event_prologue()" in source, method


@pytest.mark.seam("SmartInfinityStrategy: if the answer is wrong, the update is discarded and made again")
def test_lightning_tells_the_strategy_of_a_backward_and_knows_whether_a_step_follows() -> None:
    """Lightning's backward calls Strategy.pre_backward; _FitLoop._should_accumulate says whether a step follows."""
    assert "self.pre_backward(closure_loss)" in inspect.getsource(Strategy.backward)
    assert list(inspect.signature(Strategy.pre_backward).parameters) == ["self", "closure_loss"]
    assert list(inspect.signature(_FitLoop._should_accumulate).parameters) == ["self"]
