"""The class of a parameter follows its status: a step runs none of the code that answers user code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_smartinfinity import SmartInfinityFabricStrategy
from lightning_smartinfinity.zero3.parameters import callers, partitioned_parameter
from lightning_smartinfinity.zero3.parameters.gathering import end_gathers
from lightning_smartinfinity.zero3.parameters.status import forget_classes


@pytest.mark.parametrize("threshold", [0, 10**6], ids=["partitioned", "kept whole"])
def test_a_step_runs_no_answering_code(tmp_path: Path, threshold: int) -> None:
    """Neither forward nor backward, step or zero_grad calls a function of the modules that answer user code.

    Classes that were left with plain attributes are restored when the engine runs again.
    """
    zero = {"stage3_param_persistence_threshold": threshold}
    strategy = SmartInfinityFabricStrategy(tmp_path, overlap="none", zero=zero)
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    answered: list[str] = []
    files = {callers.__file__, partitioned_parameter.__file__}

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            answered.append(frame.f_code.co_qualname)

    def step() -> None:
        fabric.backward(model(torch.randn(2, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert answered == []
    assert float(net[0].weight.norm()) > 0
    classes = [type(param) for param in net.parameters()]
    forget_classes(net.parameters())  # as Ctrl-C within a gather may leave them
    assert [type(param) for param in net.parameters()] != classes
    end_gathers(net)
    assert [type(param) for param in net.parameters()] == classes
    strategy.close()
