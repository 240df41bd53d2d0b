"""Carries earlier state into a new training: an optimizer's state, and the masters of a module's earlier trainings.

In Lightning's mixed precisions, parameters are fp32 in memory, and a second fit continues from them. Here they are
16-bit, and the fp32 values are the masters of the first fit on storage, which the second fit removes. The second fit
therefore copies them to an unnamed temporary file first.
"""

from __future__ import annotations

import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_smartinfinity.errors import SmartInfinityError, UnsupportedError
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.storage.io.deadlines import apart
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.zero3.optimizer.outside_writes import windows_of
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.unrounded import is_rounded
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together, sum_over_ranks
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["KeptMasters", "earlier_state", "keep_masters", "write_earlier_state"]

_State = Mapping[ZeroParameter, Mapping[str, Any]]
_FP32_BYTES = 4


class KeptMasters:
    """This rank's masters of a module's earlier trainings, in files that exist as long as this object."""

    def __init__(self) -> None:
        # By ds_id: the file, and the offset of the slice in it, in bytes.
        self._places: dict[int, tuple[IO[bytes], int]] = {}

    def keep(self, owner: StorageOptimizer) -> None:
        """Copy the masters of a training, window by window.

        Args:
            owner: The optimizer of that training, whose storage is open.

        Raises:
            OSError, SmartInfinityError: The masters could not be read or written.
        """
        partition, state = owner.partition, owner.rank_state.handler.state
        file = tempfile.TemporaryFile(dir=owner.storage_folder)  # noqa: SIM115  (it lives as long as this object)
        weakref.finalize(self, apart, file.close)
        for begin, end in windows_of(partition.layout, range(len(partition.layout.tasklets))):
            state.read_range(begin, end, names=["master"])["master"].tofile(file)
        for param, own in zip(partition.params(), partition.layout.parameters, strict=True):
            self._places[param.ds_id] = file, own.offset * _FP32_BYTES

    def bring_into(self, optimizer: StorageOptimizer) -> None:
        """Copy the kept masters to a new training where its parameters hold the same values, rounded. Collective.

        Args:
            optimizer: Optimizer of this strategy.
        """
        layout, index = optimizer.partition.layout, optimizer.partition.index
        places = {layout.parameters[number].name: self._places.get(ds_id) for ds_id, number in index.items()}

        def read(own: ParameterSlice, begin: int, numel: int) -> torch.Tensor | None:
            place = places[own.name]
            if place is None:
                return None
            file, start = place
            with storage_errors("Reading a copy of masters from", optimizer.storage_folder):
                file.seek(start + begin * _FP32_BYTES)
                return torch.from_numpy(np.fromfile(file, np.float32, numel))

        written = [number for number, own in enumerate(layout.parameters) if places[own.name] is not None]
        optimizer.outside_writes.bring_in_slices(written, read)


def keep_masters(owners: Sequence[StorageOptimizer], *, of: str) -> KeptMasters | None:
    """Copy the masters of a module's earlier trainings, before those trainings' storage is closed. Collective.

    Warns if the masters are no longer available or cannot be copied.

    Args:
        owners: The optimizers of these trainings, the same on all ranks.
        of: Name of the module.

    Returns:
        The masters; None if they cannot be copied, or no earlier training had 16-bit parameters.
    """
    owners = [owner for owner in owners if is_rounded(owner.dtype)]
    if not owners:
        return None
    kept, failure = KeptMasters(), None
    if not all(owner.rank_state.is_usable and not owner.update.is_in_doubt for owner in owners):
        failure = "the storage of that training was closed, or it broke off."
    failure = _anywhere(failure)
    if failure is None:
        try:
            for owner in owners:
                owner.update.drain()
                kept.keep(owner)
        except (OSError, SmartInfinityError) as error:
            failure = f"copying them failed. {error}"
        failure = _anywhere(failure)
    if failure is None:
        return kept
    if dist.get_rank() == 0:
        warnings.warn(
            f"{of} was trained before in a mixed precision, and the fp32 values of its weights are gone: {failure} "
            f"This training begins from weights rounded to {owners[0].dtype}, unless it loads a checkpoint. To go on "
            "exactly, train it again before the strategy is closed, or resume from a checkpoint.",
            stacklevel=2,
        )
    return None


def _anywhere(failure: str | None) -> str | None:
    """Return the first failure among all ranks, or None if there is none. Collective."""
    return next(filter(None, gather(failure, None)), None) if sum_over_ranks(failure is not None, None) else None


def earlier_state(optimizer: torch.optim.Optimizer) -> _State:
    """Return torch's optimizer state of each parameter that the optimizer has updated; empty for a new optimizer.

    Raises:
        UnsupportedError: A state has an unknown name for this kind of optimizer, or not the shape of its parameter.
    """
    name, arrays = type(optimizer).__name__, rule_for(optimizer).arrays[1:]
    found = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = {key: value for key, value in optimizer.state.get(param, {}).items() if value is not None}
            if not state or float(state.get("step", 1)) == 0:  # Adagrad creates state in its constructor
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
    """Write the result of :func:`earlier_state` to storage. Collective.

    Args:
        optimizer: Optimizer of this strategy; its masters become the values of its parameters.
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
