"""Fixtures for every test that trains."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from lightning_smartinfinity.native import MemoryPool
from lightning_smartinfinity.zero3.parameters import param_swapper


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """Set Python's own Ctrl-C handler for each test, and leave that of SIGTERM as it was.

    Lightning ignores Ctrl-C after the first one, and so does a process that a shell starts in the background.
    """
    sigterm, before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, sigterm)


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """Leave the seed that ``seed_everything`` keeps in the environment to other tests as it was."""
    before = os.environ.pop("PL_GLOBAL_SEED", None)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)
    if before is not None:
        os.environ["PL_GLOBAL_SEED"] = before


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The largest number of bytes in memory for parameters so far."""
    peak, original = [0], param_swapper.lent_tensor

    def lend(pool: MemoryPool, nbytes: int) -> torch.Tensor:
        taken = original(pool, nbytes)
        peak[0] = max(peak[0], pool.nbytes)
        return taken

    monkeypatch.setattr(param_swapper, "lent_tensor", lend)
    return peak
