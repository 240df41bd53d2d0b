"""Tests what of DeepSpeed stands behind parameter groups, process groups and modules without parameters."""

from __future__ import annotations

import inspect
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups

from tests.zero3.test_contract import undecorated


def test_engine_removes_empty_groups_from_the_users_list() -> None:
    """The groups that are left are the user's own dictionaries, and stage 3 numbers them as they are in that list."""
    engine = inspect.getsource(undecorated(DeepSpeedEngine._configure_optimizer))
    removal = 'basic_optimizer.param_groups[:] = [pg for pg in basic_optimizer.param_groups if len(pg["params"]) != 0]'
    assert engine.index(removal) < engine.index("self._configure_zero_optimizer("), "groups would be put back twice"
    numbering = inspect.getsource(DeepSpeedZeroOptimizer_Stage3._get_trainable_parameter_groups)
    assert "in enumerate(self.optimizer.param_groups)" in numbering
    assert '"_ds_source_param_group_id"' in numbering, "settings would go to other groups"
    sub_groups = inspect.getsource(
        undecorated(DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation)
    )
    assert '"_ds_source_param_group_id"' in sub_groups.split("self.sub_group_to_group_id[sub_group_idx] =")[1]


def test_the_offload_asks_the_first_parameter_for_its_dtype() -> None:
    """If it no longer does, the placeholder in parameters/partitioning.py can go."""
    assert "list(module.parameters())[0].dtype" in inspect.getsource(undecorated(DeepSpeedZeRoOffload.__init__))


def test_deepspeed_keeps_its_groups_until_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached group is returned without a question, and forgotten when DeepSpeed is told so (environment.py)."""
    stale = object()
    monkeypatch.setattr(groups, "_WORLD_GROUP", stale)
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True)
    assert groups._get_data_parallel_group() is stale, "DeepSpeed itself notices that its group has ended"
    groups._release_process_group_references()
    assert groups._WORLD_GROUP is None, "a fit after destroy_process_group would use the ended group"
