"""The cost of a step grows with the number of modules, not with its square."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity.zero3.parameters.deepspeed_patches import ModuleTrace
from tests.helpers.trainers import fit

NUM_MODULES = 500


class Scale(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Many(pl.LightningModule):
    """A long chain of small modules, which counts the calls of Python functions in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Sequential(*(Scale() for _ in range(NUM_MODULES)))
        self.num_calls = 0
        self.calls: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.scales(batch).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_start(self, *_: Any) -> None:
        self.num_calls = 0
        sys.setprofile(self._count)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)
        self.calls.append(self.num_calls)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self.num_calls += event == "call"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4, 4), batch_size=1)  # type: ignore[arg-type]


@pytest.mark.long
def test_no_module_copies_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When modules release parameters, they read at most one module of the rest of the trace each."""
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
    fit(Many(), tmp_path, precision="32-true", max_steps=2)
    assert 0 < read <= 2 * (NUM_MODULES + 3)


@pytest.mark.long
def test_the_second_step_of_many_modules(tmp_path: Path) -> None:
    """It calls at most twice as many functions as the third."""
    module = Many()
    fit(module, tmp_path, precision="32-true")
    _, second, third = module.calls
    assert NUM_MODULES < second <= 2 * third
