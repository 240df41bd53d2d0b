"""Tests the private names that this package reads from DeepSpeed, torch and Lightning without overriding them."""

from __future__ import annotations

import inspect
import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import pydantic
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import constants
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.distributed.constants import default_pg_timeout

from lightning_smartinfinity.integrations.fabric.strategy import SmartInfinityFabricStrategy
from lightning_smartinfinity.settings.zero_keys import ZERO_KEYS
from lightning_smartinfinity.zero3.setup import section_keys


def test_zero_section_has_the_fields_that_are_read() -> None:
    """DeepSpeed's own parsing gives the fields that zero3/setup/validation.py reads, and forbids unknown keys."""
    zero = DeepSpeedZeroConfig(stage=3, offload_param={"device": "nvme", "nvme_path": "/nowhere"})
    assert zero.offload_param is not None and zero.offload_param.device == "nvme"
    assert zero.offload_param.buffer_count >= 1 and zero.offload_param.buffer_size > 0
    assert "buffer_size" not in zero.offload_param.model_fields_set, "defaults would look like the user's"
    assert zero.param_persistence_threshold > 0
    with pytest.raises(pydantic.ValidationError):
        DeepSpeedZeroConfig(stage=3, unknown_key=1)


def test_zero_section_has_the_keys_that_are_listed() -> None:
    """zero3/setup/section_keys.py knows every key of DeepSpeed's section and of its sections, and those only."""
    listed = {*ZERO_KEYS, *section_keys._SECTIONS, *section_keys._ANSWERS}
    gone = {"super_offload", "mics_shard_size", "mics_hierarchical_params_gather"}
    beside = {key for key, answer in section_keys._ANSWERS.items() if "beside the section" in answer.fault}
    assert listed - gone - beside == _keys_of(DeepSpeedZeroConfig)
    assert set(section_keys._SECTIONS["offload_param"]) == _keys_of(DeepSpeedZeroOffloadParamConfig)
    assert set(section_keys._SECTIONS["leaf_module"]) == _keys_of(DeepSpeedZeroLeafModuleConfig)


def _keys_of(config: type[pydantic.BaseModel]) -> set[str]:
    return {key for name, field in config.model_fields.items() for key in (name, field.alias) if key is not None}


def test_keys_of_checkpoints_are_those_of_files_that_exist() -> None:
    """Keys stay those of saved files, which optimizer_state.py and the readers of other checkpoints use."""
    assert (constants.OPTIMIZER_STATE_DICT, constants.FP32_FLAT_GROUPS) == ("optimizer_state_dict", "fp32_flat_groups")
    assert (constants.PARTITION_COUNT, constants.ZERO_STAGE) == ("partition_count", "zero_stage")
    assert (constants.LOSS_SCALER, constants.PARAM_SHAPES) == ("loss_scaler", "param_shapes")
    assert constants.FROZEN_PARAM_FRAGMENTS == "frozen_param_fragments"
    assert constants.FROZEN_PARAM_SHAPES == "frozen_param_shapes"
    assert constants.PARAM_GROUPS == "param_groups"
    assert ZeroStageEnum.weights == 3


def test_process_groups_have_a_default_timeout() -> None:
    """integrations/lightning_options.py takes torch's default timeout, as Lightning does, if the user gives none."""
    theirs = inspect.signature(DeepSpeedStrategy.__init__).parameters["timeout"].default
    assert default_pg_timeout == theirs, "process groups of ours would time out at another time than stock's"


def test_a_module_loads_its_own_part_of_a_state_dict() -> None:
    """A module loads its own parameters and buffers by the method that load/full_weights.py calls."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    weights = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    missing, unexpected, errors = [], [], []  # type: ignore[var-annotated]
    metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
    (child,) = module._modules.values()
    assert child is not None
    child._load_from_state_dict(weights, "0.", metadata["0"], True, missing, unexpected, errors)
    assert (missing, unexpected, errors) == ([], [], [])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())


def test_fabric_converts_stateful_objects() -> None:
    """Fabric replaces an object by its ``state_dict``, if it has one (fabric/strategy.py, save_checkpoint)."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.ones(1, requires_grad=True)]), lambda _: 1.0)
    state = SmartInfinityFabricStrategy()._convert_stateful_objects_in_state({"a": scheduler, "b": 1}, filter={})
    assert state == {"a": scheduler.state_dict(), "b": 1}


def test_fp32_state_is_gathered_from_a_parameter_and_its_slice() -> None:
    """The gather behind safe_get_full_* takes the parameter and the rank's padded fp32 slice."""
    gather = DeepSpeedZeroOptimizer_Stage3._fp32_state_allgather
    assert list(inspect.signature(gather).parameters) == ["self", "param", "fp32_state_partition"]


def test_schedulers_ask_the_optimizer_whether_it_stepped() -> None:
    """A scheduler warns that it stepped first unless our step sets an attribute (storage_optimizer.py)."""
    for stepped in (False, True):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        if stepped:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        assert bool(caught) != stepped, "every training with a scheduler would warn"


def test_accelerator_says_how_its_streams_behave() -> None:
    """The accelerator says that nothing runs beside the caller on a CPU, so the gradient path orders no streams."""
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


def test_accumulation_scheduler_says_whether_it_accumulates() -> None:
    """The scheduler says whether it ever accumulates; 16-bit gradients are then held in fp32 from the start."""
    assert GradientAccumulationScheduler({0: 1, 4: 2}).going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({0: 1}).going_to_accumulate_grad_batches()


def test_modules_of_lightning_are_told_their_dtype() -> None:
    """The function sets the dtype of a module and of those in it, and changes no parameter."""
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties

    outer, inner = pl.LightningModule(), pl.LightningModule()
    outer.inner, inner.layer = inner, torch.nn.Linear(1, 1)
    _update_properties(outer, dtype=torch.bfloat16)
    assert {outer.dtype, inner.dtype} == {torch.bfloat16}
    assert DeepSpeedPrecision("bf16-mixed")._desired_dtype == torch.bfloat16
    assert inner.layer.weight.dtype == torch.float32
