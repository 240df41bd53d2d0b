"""Optimizers that have nothing to do with ZeRO-3 are checked once, not at every step."""

from __future__ import annotations

import pytest
import torch

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.zero3.optimizer import taken_optimizer


def test_parameters_are_looked_at_once_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are checked again only when there are more of them or an engine may have partitioned them."""
    look, looks = taken_optimizer._refuse_partitioned, []
    monkeypatch.setattr(taken_optimizer, "_refuse_partitioned", lambda optimizer: (looks.append(1), look(optimizer)))
    taken_optimizer.refuse_foreign_steps()
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(params[:2], lr=0.1)

    def looks_in_steps(count: int) -> int:
        before = len(looks)
        for _ in range(count):
            optimizer.step()
        return len(looks) - before

    assert looks_in_steps(3) == 1
    optimizer.add_param_group({"params": params[2:]})
    assert looks_in_steps(3) == 1
    taken_optimizer.refuse_foreign_steps()
    params[2].ds_status, params[2].ds_shape = None, (2,)  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="ZeRO-3"):
            optimizer.step()
    assert len(looks) == 4
