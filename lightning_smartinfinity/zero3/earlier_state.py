"""The state of an optimizer that has stepped, or loaded a state dict, before a training takes it over."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.transfer.rules import rule_for
from lightning_smartinfinity.transfer.windows import Window
from lightning_smartinfinity.zero3.collectives import raising_together
from lightning_smartinfinity.zero3.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["earlier_state", "write_earlier_state"]

_State = Mapping[ZeroParameter, Mapping[str, Any]]


def earlier_state(optimizer: torch.optim.Optimizer) -> _State:
    """Return what torch keeps of each parameter that the optimizer has updated; empty for a new optimizer.

    Raises:
        UnsupportedError: The state is not that of such an optimizer, or has another shape than the parameter.
    """
    name, arrays = type(optimizer).__name__, rule_for(optimizer).arrays[1:]
    found = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = {key: value for key, value in optimizer.state.get(param, {}).items() if value is not None}
            if not state or float(state.get("step", 1)) == 0:  # Adagrad has a first state
                continue
            for key, value in state.items():
                shape = tuple(getattr(param, "ds_shape", param.shape))
                if key != "step" and (key not in arrays or tuple(value.shape) != shape):
                    raise UnsupportedError(
                        f"{name} has stepped before, and its state {key!r} of a parameter of shape {shape} cannot be "
                        "taken over.",
                        f"Make a new optimizer, or give it a state of {', '.join(arrays)} in the parameters' shapes.",
                    )
            found[param] = state
    return found


def write_earlier_state(optimizer: StorageOptimizer, earlier: _State) -> None:
    """Write such a state to storage. Collective.

    Args:
        optimizer: Optimizer of this strategy, whose masters stay as they are.
        earlier: The state, the same on all ranks.
    """
    layout, rank = optimizer.partition.layout, dist.get_rank(optimizer.dp_process_group)
    params = optimizer.partition.params()
    states = {own.name: earlier.get(param, {}) for own, param in zip(layout.parameters, params, strict=True)}

    def fill(window: Window) -> None:
        window.arrays[0][:] = optimizer.partition.read(window.begin, window.end).float().numpy()
        for array in window.arrays[1:]:
            array.fill(0)
        for own, begin, end in layout.real_ranges_between(window.begin, window.end):
            first = rank * own.numel + begin - own.offset
            for number, name in enumerate(optimizer.rule.arrays[1:], start=1):
                target = window.arrays[number][begin - window.begin : end - window.begin]
                value = states[own.name].get(name)
                if value is None:
                    target[:] = optimizer.first_values[number - 1]
                else:
                    target[:] = value.detach().reshape(-1)[first : first + len(target)].to("cpu", torch.float32).numpy()

    steps = [int(state.get("step", bool(state))) for state in states.values()]
    together = partial(raising_together, optimizer.dp_process_group)
    optimizer.update.drained_handler().state.replace(fill, steps=np.array(steps, np.int64), together=together)
