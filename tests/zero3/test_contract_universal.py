"""The private seams of the installed DeepSpeed that universal checkpoints stand on."""

from __future__ import annotations

import inspect
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.engine import DeepSpeedEngine


def test_converter_writes_the_files_that_are_read() -> None:
    """Flat tensors per parameter, the first rank's optimizer state as a whole, model states as they were."""
    merge = inspect.getsource(ds_to_universal.merge_zero3_slices)
    assert 'for state in ("fp32", "exp_avg", "exp_avg_sq"):' in merge
    assert "_save_checkpoint(final_path, slices[0])" in merge
    common = inspect.getsource(ds_to_universal._save_optimizer_state_stage3)
    assert "output_sd = sd[OPTIMIZER_STATE_DICT]" in common and "torch.load(optim_files[0]" in common
    assert '"optimizer_state.pt"' in common
    assert "'*model_states.pt'" in inspect.getsource(ds_to_universal.main)


def test_converter_reads_what_our_checkpoints_hold() -> None:
    """Sub-groups by their number, in the order of the shapes that the engine saves."""
    source = inspect.getsource(ds_to_universal.extract_zero_shards_stage3)
    assert "optim_sd['optimizer_state_dict']['state'][idx][\"exp_avg\"]" in source
    assert "optim_sd['fp32_flat_groups'][idx]" in source


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_get_zero_param_shapes", ["self"]),
        ("_get_zero_frozen_param_attributes", ["self", "attr_func"]),
        ("_get_param_shape_func", ["self", "param"]),
    ],
)
def test_engine_describes_its_parameters(name: str, parameters: list[str]) -> None:
    """Shapes of trained and frozen parameters by name, as checkpoints hold them."""
    assert list(inspect.signature(getattr(DeepSpeedEngine, name)).parameters) == parameters


def test_engine_loads_buffers_and_frozen_fragments() -> None:
    """The engine's own method takes what is left of a checkpoint beside masters and moments."""
    parameters = inspect.signature(DeepSpeedEngine.load_module_state_dict).parameters
    assert {"checkpoint", "strict"} <= set(parameters)
    assert "checkpoint.get(FROZEN_PARAM_FRAGMENTS, None)" in inspect.getsource(DeepSpeedEngine.load_module_state_dict)
    for name in ("global_steps", "global_samples", "skipped_steps"):
        assert f"self.{name} = checkpoint" in inspect.getsource(DeepSpeedEngine._load_checkpoint)
