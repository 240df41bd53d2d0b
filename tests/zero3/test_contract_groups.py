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


@pytest.mark.seam("SmartInfinityEngine and check_parameters: the empty groups are put back")
def test_engine_removes_empty_groups_from_the_users_list() -> None:
    """DeepSpeedEngine._configure_optimizer drops empty groups from the list; sub_group_to_group_id numbers the rest."""
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


@pytest.mark.seam("having_a_parameter: evaluating modules without parameters")
def test_the_offload_asks_the_first_parameter_for_its_dtype() -> None:
    """DeepSpeedZeRoOffload.__init__ takes its dtype from the first parameter, or from a placeholder of ours."""
    assert "list(module.parameters())[0].dtype" in inspect.getsource(undecorated(DeepSpeedZeRoOffload.__init__))


@pytest.mark.seam("a training after the process groups were destroyed")
def test_deepspeed_keeps_its_groups_until_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeed.utils.groups returns _WORLD_GROUP without a question until _release_process_group_references."""
    stale = object()
    monkeypatch.setattr(groups, "_WORLD_GROUP", stale)
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True)
    assert groups._get_data_parallel_group() is stale, "DeepSpeed itself notices that its group has ended"
    groups._release_process_group_references()
    assert groups._WORLD_GROUP is None, "a fit after destroy_process_group would use the ended group"
