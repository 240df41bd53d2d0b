"""Modules with parameter groups that differ, of which some are empty."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.hard_structures import Adapted, Reused


def grouped(named: list[tuple[str, Any]], order: str) -> list[dict[str, Any]]:
    """Return the groups of weights (w), biases (b) and nothing (0), in the order of a word of these letters."""
    weights = [param for name, param in named if not name.endswith("bias")]
    biases = [param for name, param in named if name.endswith("bias")]
    kinds: dict[str, dict[str, Any]] = {
        "w": {"params": weights, "weight_decay": 0.1, "lr": 1e-2},
        "b": {"params": biases, "weight_decay": 0.0, "lr": 5e-3},
        "0": {"params": [], "weight_decay": 0.5, "lr": 1.0},
    }
    return [dict(kinds[letter]) for letter in order]


class Decayed(Reused):
    """A module with empty groups before, between and after the others."""

    order = "0w0b0"

    def build_optimizer(self, named: list[tuple[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(grouped(named, self.order), eps=1e-4)


class Adapters(Adapted):
    """A frozen base with adapters that have no bias: the group without decay is empty."""

    def build_optimizer(self, named: list[tuple[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(grouped(named, "wb"), eps=1e-4)
