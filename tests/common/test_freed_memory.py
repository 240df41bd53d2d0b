"""Memory that torch frees goes back to the system."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_smartinfinity.common.freed_memory import FreedMemory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_gaps_between_tensors_go_back() -> None:
    """Memory that was freed between tensors in use goes back to the system."""
    torch.empty(24 << 20, dtype=torch.uint8)  # from now on the C library takes tensors up to this size from its heap
    tensors = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(64)]
    full = resident_bytes()
    del tensors[::2]
    FreedMemory(32 << 20).add(32 << 20)
    assert resident_bytes() <= full - (24 << 20) and len(tensors) == 32


def test_a_library_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without such a function in the C library, nothing happens."""
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    FreedMemory(1).add(1)


def test_it_is_done_whenever_enough_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory goes back in batches, whose size may change."""
    calls: list[int] = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(malloc_trim=calls.append))
    freed = FreedMemory(8)
    for _ in range(17):
        freed.add(1)
    assert len(calls) == 2
    freed.batch_bytes = 2
    for _ in range(5):
        freed.add(1)
    assert len(calls) == 5
