"""Gathers that Ctrl-C interrupted halfway are ended."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.zero3.parameters.gathering import end_gathers


class Handle:
    """A handle of a gather, whose ``wait`` may fail."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses, self.waited = refuses, False

    def wait(self) -> None:
        self.waited = True
        assert not self.refuses


def test_gathers_are_waited_for_or_forgotten() -> None:
    """Afterwards no gather is in flight, and a parameter that was in flight counts as not gathered."""
    module: Any = torch.nn.Linear(2, 2)
    handles = [Handle(refuses=True), Handle(refuses=False)]
    module.ds_inflight_param_registry = dict(enumerate(handles))
    module.weight.ds_status, module.bias.ds_status = ZeroParamStatus.INFLIGHT, ZeroParamStatus.AVAILABLE
    end_gathers(module)
    assert all(handle.waited for handle in handles) and not module.ds_inflight_param_registry
    assert module.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert module.bias.ds_status is ZeroParamStatus.AVAILABLE and module.bias.numel() == 2
