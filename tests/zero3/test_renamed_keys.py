"""Tests which saved parameter each parameter of a module takes its values from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.load.weight_loading import saved_names


class Renamed(torch.nn.Module):
    """A module whose ``inner`` was called ``body`` in an older version."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}body.{name}")


class Computed(Renamed):
    """A module that computes its weight from two saved ones."""

    @staticmethod
    def _rename(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state[f"{prefix}inner.weight"] = torch.cat([state.pop(f"{prefix}first"), state.pop(f"{prefix}second")])


def test_names_that_are_the_same() -> None:
    """Every parameter takes the values that were saved under its name."""
    module = torch.nn.Linear(2, 2)
    assert saved_names(module, ["weight", "bias", "other"], {}, Path()) == {"weight": "weight", "bias": "bias"}


def test_names_that_a_hook_changes() -> None:
    """A submodule's hook renames its keys; the names before and after begin with the submodule's name."""
    module = torch.nn.Sequential(Renamed())
    names = saved_names(module, ["0.body.weight", "0.body.bias"], {}, Path())
    assert names == {"0.inner.weight": "0.body.weight", "0.inner.bias": "0.body.bias"}


def test_values_that_a_hook_computes() -> None:
    """A hook that computes values is refused, since it gets only names; the error names the parameter and the file."""
    with pytest.raises(CheckpointError, match=r"Computed computes 'inner.weight' of what there holds"):
        saved_names(Computed(), ["first", "second"], {}, Path("there"))
