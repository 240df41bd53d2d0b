"""Gathers that Ctrl-C broke off between DeepSpeed's notes."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.zero3.parameters.broken_gathers import end_gathers


class Handle:
    """Waits for a gather, or refuses to."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses, self.waited = refuses, False

    def wait(self) -> None:
        self.waited = True
        assert not self.refuses


def test_gathers_are_waited_for_or_forgotten() -> None:
    """Afterwards nothing is in flight: who needs a parameter gathers it again."""
    module: Any = torch.nn.Linear(2, 2)
    handles = [Handle(refuses=True), Handle(refuses=False)]
    module.ds_inflight_param_registry = dict(enumerate(handles))
    module.weight.ds_status, module.bias.ds_status = ZeroParamStatus.INFLIGHT, ZeroParamStatus.AVAILABLE
    end_gathers(module)
    assert all(handle.waited for handle in handles) and not module.ds_inflight_param_registry
    assert module.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and module.weight.numel() == 0
    assert module.bias.ds_status is ZeroParamStatus.AVAILABLE and module.bias.numel() == 2


def test_a_module_without_gathers() -> None:
    """Nothing happens to a module that DeepSpeed does not know."""
    module = torch.nn.Linear(2, 2)
    end_gathers(module)
    assert module.weight.numel() == 4
