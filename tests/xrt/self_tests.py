"""What tests of the self-test and of the choice of a device share."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import (
    SmartSSDConfig,
    TransferConfig,
    native,
)
from lightning_smartinfinity.zero3.settings import OffloadSettings
from tests.helpers import native_testing as testing
from tests.xrt.cards import EmulatedCards

__all__ = ["held_queue", "offload"]

# The package has a function of that name.
self_test_module = importlib.import_module("lightning_smartinfinity.devices.smartssd.self_test")


def held_queue(monkeypatch: pytest.MonkeyPatch, **where: int) -> list[testing.Hold]:
    """Hold one request of every queue from now on."""
    holds = []

    class HeldBuffer:
        def __init__(self, buffer: native.CardBuffer) -> None:
            self._buffer = buffer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._buffer, name)

        def queue(self, *, timeout_ms: int) -> native.FileQueue:
            queue = self._buffer.queue(timeout_ms=timeout_ms)
            holds.append(testing.Hold(queue, **where))
            return queue

    through = self_test_module._through
    monkeypatch.setattr(
        self_test_module,
        "_through",
        lambda card, buffer, *arguments, **settings: through(card, HeldBuffer(buffer), *arguments, **settings),
    )
    return holds


def offload(tmp_path: Path, cards: EmulatedCards, wanted: str = "auto", **settings: Any) -> OffloadSettings:
    return OffloadSettings(
        storage=(tmp_path / "a", tmp_path / "b"),
        transfer=settings.pop("transfer", TransferConfig(num_buffers=2)),
        update_device=wanted,
        smartssd=settings.pop("smartssd", SmartSSDConfig(xclbin=cards.build.xclbin)),
        **settings,
    )
