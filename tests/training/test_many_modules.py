"""The cost of a step grows with the number of modules, not with its square."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smartinfinity.zero3.parameters.deepspeed_patches import ModuleTrace
from tests.helpers.trainers import fit
from tests.training.small import Small

NUM_MODULES = 500


class Scale(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Many(Small):
    """A long chain of small modules, which counts the calls of Python functions in each step."""

    def __init__(self) -> None:
        super().__init__(on_train_batch_end=self.stop)
        self.net = nn.Sequential(*(Scale() for _ in range(NUM_MODULES)))
        self.calls: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.append(0)
        sys.setprofile(self._count)

    def stop(self, _: Small) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls[-1] += event == "call"


@pytest.mark.long
def test_no_module_copies_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When modules release parameters, they read at most one module of the rest of the trace each.

    The second step calls at most twice as many functions as the third.
    """
    read = 0
    get = ModuleTrace.__getitem__

    def counting(trace: ModuleTrace, key: Any) -> Any:
        nonlocal read
        if not isinstance(key, slice):
            return get(trace, key)

        def items() -> Iterator[Any]:
            nonlocal read
            for item in get(trace, key):
                read += 1
                yield item

        return items()

    monkeypatch.setattr(ModuleTrace, "__getitem__", counting)
    module = Many()
    fit(module, tmp_path, precision="32-true", max_steps=3)
    assert 0 < read <= 3 * (NUM_MODULES + 3)
    _, second, third = module.calls
    assert NUM_MODULES < second <= 2 * third
