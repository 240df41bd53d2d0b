"""Disks that lose their power."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.helpers.model_folder import make_model_folder
from tests.helpers.power_loss import DISKS, Disk, LoopDisk, loop_devices_work
from tests.helpers.runif import NO_LOOP_DEVICE
from tests.xrt.fixtures import emulated_cards, emulated_cards_of_process

__all__ = ["disk", "emulated_cards", "emulated_cards_of_process", "model_folder"]


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """Return a disk with a folder, of which nothing is left after a power loss but what was flushed."""
    kind = DISKS[request.param]
    if kind is LoopDisk and not loop_devices_work():
        pytest.skip(NO_LOOP_DEVICE)
    with closing(kind(tmp_path)) as disk:
        yield disk


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a small Llama-shaped model, which trains on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return make_model_folder(tmp_path / "llama" / "model")
