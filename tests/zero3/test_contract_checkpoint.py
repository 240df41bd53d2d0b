"""Tests the private seams of DeepSpeed and torch that checkpoints rely on."""

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

from lightning_smartinfinity.zero3.checkpoints.checkpoint_engine import SmartInfinityCheckpointEngine
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
    """Every override has the parameters of the method it replaces, in name and order."""
    assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)


def test_torch_can_save_without_data() -> None:
    """Torch can save tensors without their data; tests/zero3/test_tensor_file.py tests the rest of torch's format."""
    assert "materialize_fake_tensors" in inspect.signature(torch.serialization.skip_data.__init__).parameters
    assert hasattr(torch.UntypedStorage, "_checkpoint_offset")
