"""The private seams of DeepSpeed and torch that checkpoints stand on."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from lightning_smartinfinity.zero3.checkpoint_engine import SmartInfinityCheckpointEngine
from lightning_smartinfinity.zero3.engine import SmartInfinityEngine


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (DeepSpeedEngine.save_checkpoint, SmartInfinityEngine.save_checkpoint),
        (DeepSpeedEngine._configure_checkpointing, SmartInfinityEngine._configure_checkpointing),
        (TorchCheckpointEngine.save, SmartInfinityCheckpointEngine.save),
        (TorchCheckpointEngine.load, SmartInfinityCheckpointEngine.load),
    ],
)
def test_overridden_methods_take_what_the_base_passes(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Names and order of the parameters are those of the method replaced."""
    assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)


def test_every_rank_saves_two_files() -> None:
    """Model states, then optimizer states, by the checkpoint engine: its save is collective."""
    for method in (DeepSpeedEngine._save_checkpoint, DeepSpeedEngine._save_zero_checkpoint):
        assert inspect.getsource(method).count("self.checkpoint_engine.save(") == 1
    source = inspect.getsource(DeepSpeedEngine.save_checkpoint)
    assert source.index("self._save_checkpoint(") < source.index("self._save_zero_checkpoint(")
    assert "self.checkpoint_engine = create_checkpoint_engine(" in inspect.getsource(
        DeepSpeedEngine._configure_checkpointing
    )


def test_the_optimizer_state_reaches_the_checkpoint_engine_as_it_was_described() -> None:
    """Saved under its own key beside the configuration, and handed to the optimizer as it was read."""
    source = inspect.getsource(DeepSpeedEngine._save_zero_checkpoint)
    assert "dict(optimizer_state_dict=self.optimizer.state_dict(), ds_config=self.config" in source
    source = inspect.getsource(DeepSpeedEngine._get_all_zero_checkpoint_state_dicts)
    assert "self.checkpoint_engine.load(" in source
    assert "[sd[OPTIMIZER_STATE_DICT] for sd in zero_sd_list]" in source


def test_names_and_shapes_of_parameters_lie_in_the_model_states() -> None:
    """They are compared before anything is loaded."""
    assert "param_shapes=self._get_zero_param_shapes()" in inspect.getsource(DeepSpeedEngine._common_checkpoint_state)
    assert list(inspect.signature(DeepSpeedEngine._get_ckpt_name).parameters)[:3] == ["self", "checkpoints_path", "tag"]


def test_persistent_parameters_are_gathered_after_checkpoints() -> None:
    """The same call gathers them after a skipped step, which DeepSpeed leaves out."""
    source = inspect.getsource(DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue)
    assert "self.persistent_parameters[0].all_gather(self.persistent_parameters)" in source


def test_torch_can_save_without_data() -> None:
    """What the files are made with; tests/zero3/test_tensor_file.py holds the rest of torch's format."""
    assert "materialize_fake_tensors" in inspect.signature(torch.serialization.skip_data.__init__).parameters
    assert hasattr(torch.UntypedStorage, "_checkpoint_offset")
