"""Tests the private seams of the installed DeepSpeed and Lightning that this package relies on."""

from __future__ import annotations

import inspect
import os
from typing import Any
from unittest import mock

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity.integrations.trainer.strategy import SmartInfinityStrategy
from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer


def undecorated(function: Any) -> Any:
    """Return the function under DeepSpeed's instrument_w_nvtx, which does not keep the signature."""
    while function.__name__ == "wrapped_fn":
        function = next(cell.cell_contents for cell in function.__closure__ if callable(cell.cell_contents))
    return function


def passed(function: Any) -> list[str]:
    """Return the names of a function's parameters, in their order."""
    return list(inspect.signature(undecorated(function)).parameters)


@pytest.mark.seam("StorageOptimizer has an arena and storage")
@pytest.mark.parametrize(
    "name",
    [
        "_setup_for_real_optimizer",
        "_create_fp32_partitions",
        "partition_grads",
        "reduce_ready_partitions_and_remove_grads",
        "reduce_independent_p_g_buckets_and_remove_grads",
        "zero_grad",
        "step",
        "_rigid_state_dict",
        "_rigid_load_state_dict",
        "_restore_from_bit16_weights",
        "_get_fp32_grad_state_partition",
        "_get_fp32_opt_state_partition",
    ],
)
def test_overridden_methods_take_what_the_base_passes(name: str) -> None:
    """Every overridden method of the optimizer has the parameters of the method it replaces, in name and order."""
    theirs = passed(getattr(DeepSpeedZeroOptimizer_Stage3, name))
    assert theirs == passed(getattr(StorageOptimizer, name)), "DeepSpeed changed what it passes"


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


@pytest.mark.seam("SmartInfinityEngine: the engines that we build")
@pytest.mark.parametrize(
    "name",
    [
        "_configure_zero_optimizer",
        "_configure_distributed_model",
        "_broadcast_model",
        "_configure_checkpointing",
        "_check_for_duplicates",
        "_do_sanity_check",
        "_get_param_fragment_func",
        "_get_all_ckpt_names",
        "_get_all_zero_checkpoint_names",
        "offload_states",
        "forward",
        "step",
        "get_global_grad_norm",
        "zero_grad",
    ],
)
def test_overridden_methods_of_the_engine_exist(name: str) -> None:
    """Every method of DeepSpeedEngine that ours overrides exists, and ours takes what the base passes."""
    theirs = inspect.signature(undecorated(getattr(DeepSpeedEngine, name)))
    required = [p for p in theirs.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    inspect.signature(getattr(SmartInfinityEngine, name)).bind(*required)


@pytest.mark.seam("which slice is this rank's")
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


@pytest.mark.seam("TrainingSession and take_options set them, and DeepSpeed is imported after the accelerator is known")
def test_strategy_has_every_attribute_of_its_base() -> None:
    """Our constructor sets every attribute that DeepSpeedStrategy.__init__, which it skips, would have set."""
    assert set(vars(DeepSpeedStrategy(stage=3))) <= set(vars(SmartInfinityStrategy()))


@pytest.mark.seam("the strategy")
@pytest.mark.parametrize(
    "name",
    [
        "setup_environment",
        "setup_distributed",
        "setup",
        "teardown",
        "on_train_start",
        "block_backward_sync",
        "model_sharded_context",
        "optimizer_step",
        "optimizer_state",
        "save_checkpoint",
        "_init_optimizers",
        "_setup_model_and_optimizer",
        "_format_config",
    ],
)
def test_strategy_hooks_have_the_signature_of_their_base(name: str) -> None:
    """Every overridden hook of DeepSpeedStrategy takes what Lightning passes."""
    assert passed(getattr(DeepSpeedStrategy, name)) == passed(getattr(SmartInfinityStrategy, name))
