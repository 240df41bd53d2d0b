"""Loads checkpoints in the way of those that another number of processes saved, where one process is all there is."""

from __future__ import annotations

import pytest

from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import FoundCheckpoint


def as_of_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines take every checkpoint for one of another number of processes."""
    monkeypatch.setattr(FoundCheckpoint, "is_of_as_many", False)
