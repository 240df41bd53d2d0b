"""A checkpoint folder is checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import CheckpointError, ConfigError
from lightning_smartinfinity.zero3.checkpoints.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.folder_check import check_frozen, check_needed


def test_what_a_trainer_needs() -> None:
    """The error names every missing key."""
    check_needed({"loops": 1, "callbacks": 2, "more": 3}, ["loops", "callbacks"], "there")
    with pytest.raises(CheckpointError, match="there lacks 'callbacks', 'loops'"):
        check_needed({"more": 3}, ["loops", "callbacks"], "there")


def test_frozen_parameters_that_were_left_out() -> None:
    """A module without frozen parameters loads a checkpoint that lacks them; for others the error names one."""
    module = torch.nn.Linear(2, 2)
    check_frozen(module, {}, "there")
    module.bias.requires_grad_(False)
    check_frozen(module, {"frozen_param_shapes": {"bias": (2,)}}, "there")
    with pytest.raises(CheckpointError, match="'bias'"):
        check_frozen(module, {"frozen_param_shapes": None}, "there")


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("damaged"), KeyError("module")])
def test_a_damaged_file(error: Exception, tmp_path: Path) -> None:
    """Any error while reading becomes one error that names the folder and the cause."""
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.*{type(error).__name__}"), reading_checkpoint(tmp_path):
        raise error


def test_our_own_errors_pass() -> None:
    """Our own errors pass unchanged, because they say more."""
    with pytest.raises(ConfigError, match="mine"), reading_checkpoint("there"):
        raise ConfigError("mine", "Do.")
