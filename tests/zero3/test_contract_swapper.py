"""Tests which attributes of a parameter swapper DeepSpeed uses, and where it creates one."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator, stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper
from tests.zero3.test_contract import assert_in_order, lacking, undecorated

ENGINE: Any = inspect.getmodule(DeepSpeedEngine)
USERS: list[Any] = [partition_parameters, partitioned_param_coordinator, stage3, parameter_offload, ENGINE]
CALLED = {
    "available_swap_in_buffers",
    "get_buffer",
    "remove_partition_and_release_buffers",
    "reserve_partitioned_swap_space",
    "swap_in",
    "swap_into_buffer",
    "swap_out_and_release",
    "swappable_tensor",
    "synchronize_reads",
}
# Methods of the swapper, each with the only DeepSpeed methods that use it, which ours replaces or never enters.
NOT_ENTERED = {
    "get_path": {"_get_sub_group_partitions"},
    "reserve_available_buffers": {"_create_fp32_partitions"},
    "release_reserved_buffers": {"_create_fp32_partitions"},
    "swap_out_partitioned_params": {"_partitioned_params_swap_out"},
}


@pytest.mark.seam("`ParameterSwapper` has all of them")
def test_every_name_that_deepspeed_uses_is_known() -> None:
    """ZeRO-3 and the engine use exactly the listed attributes of param_swapper and nvme_swapper."""
    found = {
        name
        for module in USERS
        for name in re.findall(r"(?:param_swapper|nvme_swapper)\.(\w+)", inspect.getsource(module))
        if name != "AsyncPartitionedParameterSwapper"
    }
    assert found == CALLED | set(NOT_ENTERED)


@pytest.mark.seam("ParameterSwapper accepts all arguments")
@pytest.mark.parametrize("name", sorted(CALLED))
def test_our_swapper_takes_what_deepspeed_passes(name: str) -> None:
    """Every method of our swapper has the parameters of DeepSpeed's, in name, order and default."""
    theirs = inspect.signature(getattr(AsyncPartitionedParameterSwapper, name)).parameters
    ours = inspect.signature(getattr(ParameterSwapper, name)).parameters
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.seam("ParameterSwapper and StorageOptimizer leave them out")
@pytest.mark.parametrize("name", sorted(NOT_ENTERED))
def test_other_verbs_are_used_only_where_ours_never_goes(name: str) -> None:
    """A swapper's other methods are called only by methods that we replace, or by methods that only those call."""
    users = {
        method
        for method, member in inspect.getmembers(DeepSpeedZeroOptimizer_Stage3, inspect.isfunction)
        if f".{name}(" in inspect.getsource(undecorated(member))
    }
    assert users == NOT_ENTERED[name]
    for user in users:
        replaced = getattr(StorageOptimizer, user) is not getattr(DeepSpeedZeroOptimizer_Stage3, user)
        callers = {
            method
            for method, member in inspect.getmembers(DeepSpeedZeroOptimizer_Stage3, inspect.isfunction)
            if f"self.{user}(" in inspect.getsource(undecorated(member))
        }
        # They belong to the base's _create_fp32_partitions, _setup_for_real_optimizer and step, which are all replaced.
        assert replaced or callers <= {
            "_create_fp32_partitions",
            "_reassign_or_swap_out_partitioned_parameters",
            "initialize_optimizer_states",
        }


@pytest.mark.seam("DeepSpeed uses our swapper; if the name moves, it compiles `async_io`")
def test_init_looks_the_swapper_up_when_it_begins() -> None:
    """zero.Init looks partition_parameters.AsyncPartitionedParameterSwapper up as a global, once its device is nvme."""
    made = "self.param_swapper = param_swapper or AsyncPartitionedParameterSwapper(_ds_config, self.dtype)"
    assert_in_order(partition_parameters.Init.__init__, "if self.remote_device == OffloadDeviceEnum.nvme:", made)


@pytest.mark.seam("`ParameterSwapper` reads partitions before they are gathered, and writes them when it is expected")
def test_partitions_are_there_before_they_are_gathered() -> None:
    """Gathers begin with Init._ensure_availability_of_partitioned_params, which reads from storage and waits.

    Init._partition_param writes an updated partition from a buffer, and releases others (PartitionedParamStatus).
    """
    assert_in_order(
        partition_parameters.Init._partition_param,
        "param.nvme_swapper.remove_partition_and_release_buffers([param])",
        "self.param_swapper.swappable_tensor(",
        "self.param_swapper.get_buffer(param, partition_size)",
        "param.ds_tensor.copy_(src_tensor)",
        "self.param_swapper.swap_out_and_release([param])",
    )
    init, ensuring = partition_parameters.Init, "_ensure_availability_of_partitioned_params("
    reading = ("swap_in(swap_in_list, async_op=False)", "synchronize_reads()")
    assert_in_order(init._ensure_availability_of_partitioned_params, *reading)
    assert_in_order(init._all_gather, ensuring, "_allgather_param(")
    _, _, coalesced = inspect.getsource(init._convert_to_deepspeed_param).partition("def all_gather_coalesced(")
    assert ensuring in coalesced[:600]


@pytest.mark.seam("StoredPartition: the update writes parameters to their files")
def test_a_sub_group_that_is_not_in_memory_has_no_flat_tensor() -> None:
    """fp16_partitioned_groups_flat has None for sub-groups not in memory, by ds_tensor.final_location."""
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation)
    assert "fp16_partitioned_group_flat = None" in source
    assert_in_order(
        DeepSpeedZeroOptimizer_Stage3._move_to_flat_buffer,
        "param.nvme_swapper.swap_into_buffer(param, dest)",
        "param.ds_tensor.final_location = 'not-nvme'",
    )


@pytest.mark.seam("parameters that are not trained in checkpoints: on storage, and the fp32 values of 16-bit ones")
def test_frozen_parameters_are_saved_and_loaded_by_the_engine() -> None:
    """DeepSpeedEngine._get_param_fragment_func, load_module_state_dict touch partitions (is_optimized_parameter)."""
    for name, text in (
        ("_get_param_fragment_func", "param.ds_tensor.detach().cpu()"),
        ("load_module_state_dict", "checkpoint.get(FROZEN_PARAM_FRAGMENTS, None) is not None"),
    ):
        assert lacking(getattr(DeepSpeedEngine, name), text) == []
        assert getattr(SmartInfinityEngine, name) is not getattr(DeepSpeedEngine, name)
    assert inspect.getsource(ENGINE).count("ds_tensor.d") == 2
