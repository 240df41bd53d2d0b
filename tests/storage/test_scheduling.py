"""What the processes of a machine may have in flight on a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.integrations import session as near_storage
from lightning_smartinfinity.native import IoScheduler
from lightning_smartinfinity.storage.io import scheduling
from lightning_smartinfinity.storage.io.scheduling import scheduler_of


@pytest.mark.parametrize("num_processes", [1, 4])
def test_the_ranks_of_a_machine_share_a_device(
    tmp_path: Path, num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has an equal part of what one process alone may have in flight."""
    monkeypatch.setattr(scheduling, "_schedulers", {})
    monkeypatch.setattr(scheduling, "_num_processes", 1)
    monkeypatch.setattr(near_storage, "prepare_environment", lambda device_type, *, local_world_size: None)
    strategy = SmartInfinityStrategy(tmp_path / "storage")
    strategy._prepare_environment(torch.device("cpu"), local_world_size=num_processes)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert scheduler_of(descriptor).in_flight_bytes * num_processes == IoScheduler().in_flight_bytes
    finally:
        os.close(descriptor)
