"""Offloads all activations of every training, as if each had asked for it."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["ASKED_FOR", "EVERYTHING", "offload_everything"]

ASKED_FOR = "TEST_WITH_ACTIVATIONS_ON_STORAGE"
"""Environment variable with which all trainings of the tests offload their activations."""

EVERYTHING = {"keep": 0, "min_bytes": 1, "host_bytes": 32 << 10, "budget_bytes": 48 << 10}
"""Settings with which everything leaves, through so little memory that forward and backward wait."""


def offload_everything() -> None:
    """Let every training of this process that says nothing of activations offload all of them."""
    from lightning_smartinfinity import ActivationOffload, settings

    asked = settings.activation_offload

    def all_or_asked(activations: Any, *, owner: str) -> ActivationOffload | None:
        return asked(EVERYTHING if activations is None else activations, owner=owner)

    settings.activation_offload = all_or_asked


if os.environ.get(ASKED_FOR):
    offload_everything()
