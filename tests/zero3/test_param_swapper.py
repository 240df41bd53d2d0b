"""Writing of parameters ends whole, whatever fails on the way."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper

FULL = StorageError("The disk is full.", "Free some space.")


@pytest.mark.parametrize(
    ("starts", "ends", "raised", "awaited"),
    [({2: FULL}, {}, StorageError, [0, 1]), ({}, {0: FULL, 1: KeyboardInterrupt()}, KeyboardInterrupt, [0, 1, 2])],
    ids=["a write that cannot be started", "an interrupt among writes"],
)
def test_writes_that_were_started_are_finished(
    starts: dict[int, BaseException],
    ends: dict[int, BaseException],
    raised: type[BaseException],
    awaited: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They release their memory whichever start or end fails, and an interrupt is what is raised."""
    finished: list[int] = []

    def start(param: int) -> int:
        if param in starts:
            raise starts[param]
        return param

    def finish(ticket: int) -> None:
        finished.append(ticket)
        if ticket in ends:
            raise ends[ticket]

    settings: Any = SimpleNamespace()
    swapper: Any = ParameterSwapper(settings)
    monkeypatch.setattr(swapper, "_store", SimpleNamespace(finish=finish))
    monkeypatch.setattr(swapper, "_together", nullcontext)
    monkeypatch.setattr(swapper, "_start_write", start)
    monkeypatch.setattr(swapper, "remove_partition_and_release_buffers", lambda params: None)
    with pytest.raises(raised):
        swapper.swap_out_and_release([0, 1, 2])
    assert finished == awaited
