"""Memory that torch frees goes back to the system."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_smartinfinity.activations.freed_memory import FreedMemory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_gaps_between_tensors_go_back() -> None:
    """Memory that was freed between tensors in use goes back to the system."""
    torch.empty(24 << 20, dtype=torch.uint8)  # from now on the C library takes tensors up to this size from its heap
    tensors = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(64)]
    full = resident_bytes()
    del tensors[::2]
    freed = FreedMemory()
    for _ in range(32):
        freed.add(8 << 20, most_saved=64 << 20)
    assert resident_bytes() <= full - (24 << 20) and len(tensors) == 32


def test_a_library_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without such a function in the C library, nothing happens."""
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    freed = FreedMemory()
    freed.add(1 << 30, most_saved=0)


def test_it_is_done_twice_in_a_large_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory goes back in halves of what a forward saves, in pieces of 256 MiB at least."""
    calls: list[int] = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(malloc_trim=calls.append))
    freed = FreedMemory()
    for _ in range(1024):
        freed.add(1 << 20, most_saved=1 << 30)
    assert len(calls) == 2
    for _ in range(512):
        freed.add(1 << 20, most_saved=32 << 20)
    assert len(calls) == 4
