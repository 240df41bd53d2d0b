"""torch tensors over the native core's memory, and as the plain addresses that it takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.transfer.plan import Flat

__all__ = ["HostTensor", "PendingCopies", "flat_of", "native_dtype"]

_DTYPES = {
    torch.float32: native.DType.FLOAT32,
    torch.float16: native.DType.FLOAT16,
    torch.bfloat16: native.DType.BFLOAT16,
}


def native_dtype(dtype: torch.dtype) -> native.DType:
    """The native core's name of a torch dtype (float32, float16 or bfloat16)."""
    return _DTYPES[dtype]


def flat_of(tensor: torch.Tensor) -> Flat:
    """A contiguous CPU tensor as a :class:`Flat`; the caller keeps the tensor alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "only contiguous host memory has a flat address"
    return Flat(tensor.data_ptr(), tensor.numel(), native_dtype(tensor.dtype))


class HostTensor:
    """A 1-D tensor over a huge-paged mapping that forked children do not inherit, registered with CUDA if there is one.

    Registering is best effort: without it copies still work, only not asynchronously.

    Args:
        numel: Number of elements.
        dtype: Of the elements.

    Attributes:
        tensor: The tensor, zero-filled. It keeps the mapping alive.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._buffer = native.HostBuffer(max(1, numel * dtype.itemsize))
        self.tensor = torch.frombuffer(self._buffer.memoryview(), dtype=torch.uint8)[: numel * dtype.itemsize].view(
            dtype
        )
        # Registered memory must be given back even when nobody calls close().
        self._unregister: Callable[[], object] = _nothing
        if torch.cuda.is_available() and _register(self._buffer):
            self._unregister = weakref.finalize(self, _unregister, self._buffer)

    def close(self) -> None:
        """Unregister; idempotent."""
        self._unregister()


class PendingCopies:
    """Asynchronous copies between CUDA and host memory that have not been waited for."""

    def __init__(self) -> None:
        self._streams: set[torch.cuda.Stream] = set()

    def note(self, device: torch.device) -> None:
        """A copy was started on the current stream of ``device``."""
        if device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return when they have completed."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()


def _register(buffer: native.HostBuffer) -> bool:
    return int(_cuda_runtime().cudaHostRegister(buffer.address, buffer.nbytes, 0)) == 0


def _unregister(buffer: native.HostBuffer) -> None:
    _cuda_runtime().cudaHostUnregister(buffer.address)


def _nothing() -> None:
    """Memory that was not registered."""


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
