"""torch tensors over the native core's memory, and addresses of torch tensors for the core."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_smartinfinity import native

__all__ = ["DTYPES", "Flat", "HostTensor", "flat_of", "lent_tensor", "native_dtype", "torch_dtype"]

DTYPES = {
    torch.float32: native.DType.FLOAT32,
    torch.float16: native.DType.FLOAT16,
    torch.bfloat16: native.DType.BFLOAT16,
}
"""The native core's dtype for each torch dtype that the core supports."""


@dataclass(frozen=True, slots=True)
class Flat:
    """One sub-group's contiguous memory. The caller keeps it alive while it is in use.

    Args:
        address: The first element's address.
        numel: Number of elements.
        dtype: The elements' dtype.
    """

    address: int
    numel: int
    dtype: native.DType


def native_dtype(dtype: torch.dtype) -> native.DType:
    """Return the native core's dtype for a torch dtype (float32, float16 or bfloat16)."""
    return DTYPES[dtype]


def torch_dtype(dtype: native.DType) -> torch.dtype:
    """Return the torch dtype for a dtype of the native core."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def flat_of(tensor: torch.Tensor) -> Flat:
    """Return a contiguous CPU tensor as a :class:`Flat`; the caller keeps the tensor alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "only contiguous host memory has a flat address"
    return Flat(tensor.data_ptr(), tensor.numel(), native_dtype(tensor.dtype))


def lent_tensor(pool: native.MemoryPool, nbytes: int) -> torch.Tensor:
    """Return whole blocks of a pool as a 1-D uint8 tensor with arbitrary content.

    The blocks return to the pool when the last tensor over them is deleted, including views that autograd saved.
    """
    return torch.frombuffer(pool.take(nbytes).memoryview(), dtype=torch.uint8)


class HostTensor:
    """A 1-D tensor over a huge-paged mapping that forked children do not inherit.

    Args:
        numel: Number of elements.
        dtype: Dtype of the elements.

    Attributes:
        tensor: The tensor, zero-filled. It keeps the mapping alive.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        nbytes = numel * dtype.itemsize
        buffer = native.HostBuffer(max(1, nbytes))
        self.tensor = torch.frombuffer(buffer.memoryview(), dtype=torch.uint8)[:nbytes].view(dtype)
