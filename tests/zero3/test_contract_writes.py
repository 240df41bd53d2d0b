"""Tests the private seams through which parameters are written from outside of steps."""

from __future__ import annotations

import inspect
import os
from unittest import mock

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity.integrations.trainer.strategy import SmartInfinityStrategy
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from tests.zero3.test_contract import passed

OVERRIDDEN = [
    "set_full_hp_param",
    "set_local_hp_param",
    "get_fp32_grad_for_param",
    "get_local_fp32_grad_for_param",
    "set_fp32_grad_for_param",
    "set_local_grad_for_param",
    "update_fp32_grad_for_param_vectorized",
]


@pytest.mark.seam("StateByParameter: safe_get_*, safe_set_*")
@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods_take_what_deepspeed_passes(name: str) -> None:
    """set_full_hp_param, set_local_hp_param, get_fp32_grad_for_param and their kin have the parameters of ours."""
    assert passed(getattr(DeepSpeedZeroOptimizer_Stage3, name)) == passed(getattr(StorageOptimizer, name))


@pytest.mark.seam("every write reaches storage, by StateByParameter")
def test_every_writer_of_state_is_overridden() -> None:
    """Every method that fetches a partition to write to it (``release_swap_buffers=False``) is overridden."""
    writers = {
        name
        for name, member in inspect.getmembers(DeepSpeedZeroOptimizer_Stage3, inspect.isfunction)
        if "release_swap_buffers=False" in inspect.getsource(member)
    }
    assert writers and writers <= set(OVERRIDDEN)


@pytest.mark.seam("SmartInfinityStrategy loads full weights")
def test_lightning_restores_full_weights_by_the_overridden_hook() -> None:
    """load_full_weights ends in DeepSpeedStrategy._restore_zero_state with what load_checkpoint returned."""
    for name in ("load_checkpoint", "_restore_zero_state"):
        assert passed(getattr(DeepSpeedStrategy, name)) == passed(getattr(SmartInfinityStrategy, name))
    strategy = mock.MagicMock(load_full_weights=True, zero_stage_3=True)
    DeepSpeedStrategy.load_model_state_dict(strategy, {"state_dict": {}}, strict=False)
    strategy._restore_zero_state.assert_called_once_with({"state_dict": {}}, strict=False)
