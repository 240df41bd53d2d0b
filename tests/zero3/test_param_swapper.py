"""Writing of parameters ends whole, whatever fails on the way."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.zero3.parameters import param_swapper
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper


class Store:
    """A store whose transfers end as told."""

    def __init__(self, outcomes: dict[int, BaseException]) -> None:
        self.outcomes = outcomes
        self.finished: list[int] = []

    def finish(self, ticket: int) -> None:
        """End a transfer."""
        self.finished.append(ticket)
        if ticket in self.outcomes:
            raise self.outcomes[ticket]


def swapper_with(store: Store, monkeypatch: pytest.MonkeyPatch) -> ParameterSwapper:
    """Return a swapper of one rank whose parameters are tickets, and are in no memory."""
    settings: Any = SimpleNamespace()
    swapper = ParameterSwapper(settings)
    monkeypatch.setattr(swapper, "_store", store)
    monkeypatch.setattr(swapper, "_together", nullcontext)
    monkeypatch.setattr(swapper, "remove_partition_and_release_buffers", lambda params: None)
    return swapper


def test_reading_ahead_leaves_a_part_of_the_budget_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise parameters would find no memory that others have left, and the system would clear other memory."""
    swapper = swapper_with(Store({}), monkeypatch)
    swapper.settings = SimpleNamespace(budget=8 * 4096)  # type: ignore[assignment]
    monkeypatch.setattr(param_swapper, "_holders", lambda: 1)
    params: Any = [SimpleNamespace(ds_tensor=SimpleNamespace(ds_numel=2048), dtype=torch.bfloat16) for _ in range(8)]
    assert swapper.available_swap_in_buffers() == 6
    assert swapper._fitting(params) == params[:6]


def test_a_write_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were started before it are finished, and so release their memory."""
    store = Store({})
    swapper = swapper_with(store, monkeypatch)

    def start_write(param: Any) -> int:
        if param == 2:
            raise StorageError("The disk is full.", "Free some space.")
        return int(param)

    monkeypatch.setattr(swapper, "_start_write", start_write)
    with pytest.raises(StorageError, match="full"):
        swapper.swap_out_and_release([0, 1, 2, 3])
    assert store.finished == [0, 1]


def test_an_interrupt_among_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfers after the interrupted one are finished, too, and the interrupt is what is raised."""
    store = Store({0: StorageError("The disk is full.", "Free some space."), 1: KeyboardInterrupt()})
    swapper = swapper_with(store, monkeypatch)
    monkeypatch.setattr(swapper, "_start_write", lambda param: param)
    with pytest.raises(KeyboardInterrupt):
        swapper.swap_out_and_release([0, 1, 2])
    assert store.finished == [0, 1, 2]
