"""Loads checkpoints in the way of those that another number of processes saved, where one process is all there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.zero3 import engine
from lightning_smartinfinity.zero3.checkpoints.folder_check import folder_to_resume


def as_of_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines take every checkpoint for one of another number of processes."""

    def found(*args: Any, **kwargs: Any) -> tuple[Path, bool]:
        return folder_to_resume(*args, **kwargs)[0], False

    monkeypatch.setattr(engine, "folder_to_resume", found)
