"""The private seams of the installed DeepSpeed and Lightning that this package stands on."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity.strategy import SmartInfinityStrategy
from lightning_smartinfinity.zero3.engine import SmartInfinityEngine
from lightning_smartinfinity.zero3.optimizer import SmartInfinityOptimizer

OVERRIDDEN = [
    "_setup_for_real_optimizer",
    "_create_fp32_partitions",
    "partition_grads",
    "reduce_ready_partitions_and_remove_grads",
    "zero_grad",
    "step",
    "_rigid_state_dict",
    "_rigid_load_state_dict",
    "_restore_from_bit16_weights",
    "_get_fp32_grad_state_partition",
    "_get_fp32_opt_state_partition",
]
CALLED = [
    "_pre_step",
    "_partition_all_parameters",
    "_loss_scale_update_and_overflow_cleanup",
    "_post_step",
    "_get_param_partition_rank",
]


def undecorated(function: Any) -> Any:
    """The function under DeepSpeed's instrument_w_nvtx, which does not keep the signature."""
    while function.__name__ == "wrapped_fn":
        function = next(cell.cell_contents for cell in function.__closure__ if callable(cell.cell_contents))
    return function


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods_take_what_the_base_passes(name: str) -> None:
    """Every overridden method has the parameters of the method it replaces, in name and order."""
    theirs = inspect.signature(undecorated(getattr(DeepSpeedZeroOptimizer_Stage3, name)))
    ours = inspect.signature(getattr(SmartInfinityOptimizer, name))
    assert list(theirs.parameters) == list(ours.parameters), "DeepSpeed changed what it passes"


@pytest.mark.parametrize("name", CALLED)
def test_called_methods_exist(name: str) -> None:
    """The base still has every verb that our step calls."""
    assert callable(getattr(DeepSpeedZeroOptimizer_Stage3, name))


def test_constructor_calls_the_overridden_setup() -> None:
    """The base constructor builds partitions, then calls _setup_for_real_optimizer, then positions and hooks."""
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3.__init__)
    order = [
        source.index(call)
        for call in (
            "self._create_fp16_partitions_with_defragmentation(",
            "self._setup_for_real_optimizer()",
            "self.set_grad_positions()",
            "self.create_reduce_and_remove_grad_hooks()",
        )
    ]
    assert order == sorted(order)


def test_setup_override_replaces_all_that_the_base_sets_up() -> None:
    """What the base's _setup_for_real_optimizer assigns is what ours assigns or replaces."""
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer)
    assigned = {
        line.split("=")[0].split(":")[0].strip() for line in source.splitlines() if "self." in line and " = " in line
    }
    assert {name for name in assigned if name.startswith("self.")} == {
        "self.grad_partitions_flat_buffer",
        "self.__param_id_to_grad_partition",
        "self.__param_id_to_grad_partition[param.ds_id]",
    }


def test_private_gradient_map_is_only_read_where_overridden() -> None:
    """The base's gradient map, which ours never builds, is used only by methods that ours replaces or never enters."""
    users = {
        name
        for name, member in inspect.getmembers(DeepSpeedZeroOptimizer_Stage3, inspect.isfunction)
        if "__param_id_to_grad_partition" in inspect.getsource(member)
    }
    replaced = {"_setup_for_real_optimizer", "partition_grads", "_get_fp32_grad_state_partition"}
    not_entered = {
        "independent_gradient_partition_epilogue",  # only without offload_optimizer
        # Both only with managed_gradient_accumulation off, which nobody can set.
        "finalize_gradient_accumulation_boundary",
        "_finalize_offload_gradient_accumulation",
        "update_fp32_grad_for_param_vectorized",  # only without offload_optimizer
        "set_fp32_grad_for_param",
        "set_local_grad_for_param",
        "offload_states",  # refused by the engine
        "reload_states",  # only after the one above
    }
    assert users <= replaced | not_entered


def test_engine_imports_the_optimizer_class_at_call_time() -> None:
    """_configure_zero_optimizer looks the class up in its module when called, so that a subclass can stand in."""
    source = inspect.getsource(DeepSpeedEngine._configure_zero_optimizer)
    assert "from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3" in source
    assert list(inspect.signature(SmartInfinityEngine._configure_zero_optimizer).parameters) == ["self", "optimizer"]


def test_engine_asks_the_accelerator_about_fp16_in_its_sanity_check_only() -> None:
    """The check that ours widens on a CPU is the engine's only question about fp16."""
    assert "get_accelerator().is_fp16_supported()" in inspect.getsource(DeepSpeedEngine._do_sanity_check)
    assert inspect.getsource(inspect.getmodule(DeepSpeedEngine)).count("is_fp16_supported") == 1  # type: ignore[arg-type]


def test_initialize_builds_the_engine_from_its_module_global() -> None:
    """deepspeed.initialize calls DeepSpeedEngine by its global name, with keywords only."""
    source = inspect.getsource(deepspeed.initialize)
    assert "engine = DeepSpeedEngine(args=args," in source


def test_shared_memory_op_can_be_declined() -> None:
    """DeepSpeed consults the table of compatible ops before it compiles its shared-memory collectives."""
    from deepspeed.comm.torch import build_shm_op

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    assert "__compatible_ops__.get(builder.NAME, False)" in inspect.getsource(build_shm_op)


def test_strategy_has_every_attribute_of_its_base() -> None:
    """Our constructor, which skips DeepSpeedStrategy's, sets every attribute that it would have set."""
    assert set(vars(DeepSpeedStrategy(stage=3))) <= set(vars(SmartInfinityStrategy()))


@pytest.mark.parametrize(
    "name",
    [
        "setup_environment",
        "setup_distributed",
        "setup",
        "teardown",
        "optimizer_step",
        "_init_optimizers",
        "_setup_model_and_optimizer",
        "_format_config",
    ],
)
def test_strategy_hooks_have_the_signature_of_their_base(name: str) -> None:
    """Every overridden hook takes what Lightning passes."""
    theirs = inspect.signature(getattr(DeepSpeedStrategy, name))
    ours = inspect.signature(getattr(SmartInfinityStrategy, name))
    assert list(theirs.parameters) == list(ours.parameters)
