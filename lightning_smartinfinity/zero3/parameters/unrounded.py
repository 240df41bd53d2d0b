"""Keeps fp32 values of 16-bit parameters, so that small in-place changes are not lost to rounding.

In Lightning's mixed precisions parameters are fp32, so a moving average with a decay near 1 changes. Here parameters
are 16-bit, and their fp32 values are kept separately. For a trained parameter these are its masters on storage. A
parameter that is not trained, such as a teacher's, gets an fp32 copy of this rank's slice on the first write.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from lightning_smartinfinity.zero3.parameters.gathering import broadcast, whole_data
from lightning_smartinfinity.zero3.parameters.status import training_of
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = [
    "is_fp32_in_memory",
    "is_rounded",
    "keep_slice",
    "note_fp32_in_memory",
    "settle",
    "take_full",
    "unrounded",
    "unrounded_slice",
    "waiting",
    "write_unrounded",
]

# Full values until the parameter is partitioned, and this rank's slice of a parameter that is not trained.
_WAITING, _SLICE = "_unrounded", "_unrounded_slice"
_FP32_IN_MEMORY = "_is_fp32_in_memory"


def note_fp32_in_memory(params: Iterable[torch.nn.Parameter]) -> None:
    """Mark parameters that would be fp32 if they were trained in memory, as in a mixed precision."""
    for param in params:
        param.__dict__[_FP32_IN_MEMORY] = True


def is_fp32_in_memory(param: ZeroParameter) -> bool:
    """Return whether :func:`note_fp32_in_memory` has marked a parameter."""
    return _FP32_IN_MEMORY in param.__dict__


def is_rounded(dtype: torch.dtype) -> bool:
    """Return whether this is a 16-bit floating-point dtype."""
    return dtype in (torch.bfloat16, torch.float16)


def unrounded(param: ZeroParameter) -> torch.Tensor:
    """Return the fp32 values of a 16-bit parameter, in its shape. Collective.

    Where the parameter differs from these values rounded, it was written since: there the result has the parameter's
    values.

    Args:
        param: The parameter, gathered.
    """
    now = whole_data(param)
    training = training_of(param)
    values = param.__dict__.get(_WAITING)
    if values is not None:
        pass
    elif training is not None and training.has_master(param):
        values = training.full_master(param)
    elif _SLICE in param.__dict__:
        values = _gathered_slices(param)
    else:
        return now.float()
    values = values.view(now.shape)
    return torch.where(values.to(now.dtype) == now, values, now.float())


def write_unrounded(param: ZeroParameter, values: torch.Tensor) -> None:
    """Give a gathered parameter new values; all ranks get those of rank 0. Collective.

    Args:
        param: The parameter. Partitioning it updates its masters.
        values: Its values (fp32, of its shape). The function keeps a reference to them.
    """
    broadcast(param, values)
    whole_data(param).copy_(values)
    param.__dict__[_WAITING] = values


def waiting(param: ZeroParameter) -> torch.Tensor | None:
    """Return fp32 values that were written to a parameter but not to its masters yet; None if there are none."""
    values: torch.Tensor | None = param.__dict__.get(_WAITING)
    return values


def settle(param: ZeroParameter) -> None:
    """After partitioning a parameter, keep this rank's slice of written fp32 values, unless it has a master.

    Args:
        param: The parameter.
    """
    values = param.__dict__.pop(_WAITING, None)
    if values is None:
        return
    training = training_of(param)
    if training is not None and training.has_master(param):
        return
    numel = param.ds_tensor.ds_numel
    own = torch.zeros(numel, dtype=torch.float32, device=param.device)
    given = values.flatten()[numel * dist.get_rank(param.ds_process_group) :][:numel]
    own[: given.numel()] = given
    param.__dict__[_SLICE] = own


def unrounded_slice(param: ZeroParameter, partition: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a parameter, in fp32 if fp32 values of its 16-bit partition are known.

    Args:
        param: The parameter, which is not trained.
        partition: Its partition (flat, padded), on the CPU.
    """
    own = param.__dict__.get(_SLICE)
    if own is None:
        return partition
    own = own.cpu()
    return torch.where(own.to(partition.dtype) == partition, own, partition.float())


def keep_slice(param: ZeroParameter, values: torch.Tensor) -> None:
    """Keep this rank's slice of a parameter that is not trained, from a checkpoint.

    Args:
        param: The parameter.
        values: Its slice (flat, padded); kept only if it is fp32 and the parameter is 16-bit.
    """
    param.__dict__.pop(_SLICE, None)
    if is_rounded(param.dtype) and values.dtype is torch.float32:
        param.__dict__[_SLICE] = values.detach().to(param.device, copy=True)


def take_full(param: ZeroParameter) -> torch.Tensor | None:
    """Remove and return fp32 values written to a parameter before its training; None if there are none. Collective."""
    if _SLICE not in param.__dict__:
        return None
    full = _gathered_slices(param)
    del param.__dict__[_SLICE]
    return full


def _gathered_slices(param: ZeroParameter) -> torch.Tensor:
    own: torch.Tensor = param.__dict__[_SLICE]
    full = own.new_empty(own.numel() * dist.get_world_size(param.ds_process_group))
    dist.all_gather_into_tensor(full, own, group=param.ds_process_group)
    return full[: param.ds_numel].view(param.ds_shape)
