"""Optimizers of others may step parameters of their own, and none that ZeRO-3 has partitioned."""

from __future__ import annotations

import pytest
import torch

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.zero3.optimizer.taken_optimizer import refuse_foreign_steps


@pytest.mark.parametrize("comes_late", [False, True])
def test_steps_of_partitioned_parameters_are_refused(comes_late: bool) -> None:
    """An optimizer that was accepted is looked at again when it has more parameters, or there is a new engine."""
    refuse_foreign_steps()
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(params[:2] if comes_late else params, lr=0.1)
    for _ in range(2):
        optimizer.step()
    params[2].ds_status, params[2].ds_shape = None, (2,)  # type: ignore[attr-defined]
    if comes_late:
        optimizer.add_param_group({"params": params[2:]})
    else:
        refuse_foreign_steps()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="ZeRO-3"):
            optimizer.step()
