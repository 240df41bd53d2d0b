"""Runs the Python blocks of the page on activations on a small model in place of the reader's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from tests.examples.pages import page, scripts_in

STRATEGY, PAUSE, GPU, LOOP = scripts_in(page("docs/activations.md"))


class Model(torch.nn.Linear):
    """A model whose forward returns a loss."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch).square().mean()


def test_the_settings_of_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """All Trainers can be made as they are written."""
    found: list[ActivationOffload] = []
    monkeypatch.setattr("lightning.pytorch.Trainer", lambda *, strategy: found.append(strategy._settings.activations))
    exec(STRATEGY, {})
    exec(GPU, {})
    settings = [{}, {"budget_bytes": "8GB"}, {"host_bytes": "48GB"}]
    assert found == [ActivationOffload(**each) for each in settings]


def test_the_pause() -> None:
    """The gradient of a function is taken within it."""
    names: dict[str, Any] = {"f": torch.sin, "x": torch.zeros(())}
    exec(PAUSE, names)
    assert names["slope"] == 1


def test_the_loop(tmp_path: Path) -> None:
    """It trains to the same parameters as a loop without offloading."""
    loader = list(torch.randn(3, 50, 40, generator=torch.Generator().manual_seed(0)))
    trained = []
    for script in (LOOP, LOOP.replace("with activations.forward(batch):", "if True:")):
        torch.manual_seed(0)
        model = Model(40, 30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(
            script.replace("/mnt/nvme", str(tmp_path)).replace('budget_bytes="8GB"', "keep=0, min_bytes=1"),
            names := {"model": model, "loader": loader, "optimizer": optimizer},
        )
        trained.append((model.weight.detach(), names["activations"].traffic().offloaded_bytes > 0))
    (offloaded, has_moved), (plain, has_moved_plain) = trained
    assert has_moved and not has_moved_plain
    assert torch.equal(offloaded, plain)
