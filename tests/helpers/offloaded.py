"""Offloads all activations of every training, as if each had asked for it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

ASKED_FOR = "TEST_WITH_ACTIVATIONS_ON_STORAGE"
"""Environment variable with which all trainings of the tests offload their activations."""

EVERYTHING = {"keep": 0, "min_bytes": 1, "host_bytes": 32 << 10, "budget_bytes": 48 << 10}
"""Settings with which everything leaves, through so little memory that forward and backward wait."""


def offload_everything() -> None:
    """Let every training that says nothing of activations offload all of them, as long as that is asked for."""
    # Here, since every process of a test imports this module, and most need none of it.
    from lightning_smartinfinity import ActivationOffload
    from lightning_smartinfinity.activations import OffloadedActivations
    from lightning_smartinfinity.settings import strategy as settings

    asked = settings.activation_offload

    def all_or_asked(activations: Any, *, owner: str) -> ActivationOffload | None:
        offloads = activations is None and os.environ.get(ASKED_FOR)
        return asked(EVERYTHING if offloads else activations, owner=owner)

    settings.activation_offload = all_or_asked
    OffloadedActivations.open = _opening_late(OffloadedActivations.open)


def _opening_late(opening: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the method with which transfers begin late, in an order that differs between trainings."""
    seeds = itertools.count(os.getpid())

    from tests.helpers.native_testing import inject

    def open_late(self: Any) -> None:
        is_first = not self._store.files.was_opened
        opening(self)
        if is_first:
            inject(self._store.files.core, seed=next(seeds), max_delay_us=300, short_transfer_every=3)

    return open_late


if os.environ.get(ASKED_FOR):
    offload_everything()
