"""Fixtures of tests on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def on_the_device() -> Iterator[None]:
    """Tensors are made on the device."""
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()
