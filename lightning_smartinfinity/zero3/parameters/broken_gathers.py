"""Ends gathers of parameters that were interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import cast

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.zero3.parameters.status import restore_classes
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["end_gathers"]


def end_gathers(module: torch.nn.Module) -> None:
    """Wait for the gathers in flight, and reset parameters whose gather cannot be waited for.

    DeepSpeed marks parameters as in flight before it records their wait handles, and removes a handle before it waits.
    Ctrl-C in between leaves some marked parameters without a handle. As several parameters share a gather, it leaves
    others whose wait fails.
    """
    params = [param for param in cast(Iterator[ZeroParameter], module.parameters()) if "_classes" in param.__dict__]
    restore_classes(params)  # Ctrl-C may have interrupted restore_classes itself
    awaited = getattr(module, "ds_inflight_param_registry", {})
    handles = list(awaited.values())
    awaited.clear()
    for handle in handles:
        with suppress(AssertionError):  # some of its parameters are already gathered
            handle.wait()
    for param in cast(Iterator[ZeroParameter], module.parameters()):
        if getattr(param, "ds_status", None) is ZeroParamStatus.INFLIGHT:
            param.data = param.data.new_empty(0)
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE
