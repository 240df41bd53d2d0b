"""Writing of parameters ends whole, whatever fails on the way."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_smartinfinity.errors import StorageError
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
