"""What goes wrong while a checkpoint folder is read becomes an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import CheckpointError, ConfigError
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.load.weight_loading import saved_names


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("damaged"), KeyError("module")])
def test_a_damaged_file(error: Exception, tmp_path: Path) -> None:
    """Any error while reading becomes one error that names the folder and the cause. Our own say more, and pass."""
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.*{type(error).__name__}"), reading_checkpoint(tmp_path):
        raise error
    with pytest.raises(ConfigError, match="mine"), reading_checkpoint(tmp_path):
        raise ConfigError("mine", "Do.")


def test_values_that_a_hook_computes() -> None:
    """A hook that computes values is refused, since it gets only names; the error names the parameter and the file."""

    def join(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state["weight"] = torch.cat([state.pop("first"), state.pop("second")])

    module = torch.nn.Linear(2, 2)
    module.register_load_state_dict_pre_hook(join)
    with pytest.raises(CheckpointError, match=r"Linear computes 'weight' of what there holds"):
        saved_names(module, ["first", "second"], {}, Path("there"))
