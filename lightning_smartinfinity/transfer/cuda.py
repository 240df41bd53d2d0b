"""torch tensors in the memory of a CUDA device, as the native core reaches them: addresses, streams and events.

Nothing here waits for a device as a whole: only for events, and on the host only where host memory is about to be read.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.transfer.partitions import CudaPartition
from lightning_smartinfinity.transfer.tensors import Flat, HostTensor, native_dtype

__all__ = ["CudaLink", "GradientCopies", "link_to"]

_CHUNK_NUMEL = 1 << 20


def link_to(device: torch.device) -> CudaLink | None:
    """The process's link to a device; None if it is not a CUDA device, such as the host or one of ROCm's."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return _link(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _link(index: int) -> CudaLink:
    return CudaLink(index)


class CudaLink:
    """One CUDA device, with torch's streams on it and a stream of our own.

    Args:
        index: Of the device, as torch counts.

    Attributes:
        device: The native core's.
        stream: What updated parameters travel on.

    Raises:
        CudaError: The driver or the device cannot be used.
    """

    def __init__(self, index: int) -> None:
        self.device = native.CudaDevice(index)
        self.stream = native.CudaStream(self.device)
        self._where = torch.device("cuda", index)
        self._warned = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the device's memory."""
        return tensor.device == self._where

    def current_stream(self) -> int:
        """Handle of torch's current stream."""
        return torch.cuda.current_stream(self._where).cuda_stream

    def take(self) -> None:
        """Lets copies from now on run after what torch's current stream was given so far."""
        self.stream.follow(self.current_stream())

    def give(self) -> None:
        """Lets what torch's current stream is given from now on run after the copies started so far."""
        self.stream.lead(self.current_stream())

    def keep(self, tensor: torch.Tensor) -> None:
        """Let the tensor's memory not be used again before the current stream has done what it was given so far."""
        tensor.record_stream(torch.cuda.current_stream(self._where))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device for use on its streams."""
        return torch.empty(numel, dtype=dtype, device=self._where)

    def add(self, total: torch.Tensor, other: torch.Tensor) -> None:
        """``total += other`` on the current stream."""
        total.add_(other)

    def host_tensor(self, numel: int, dtype: torch.dtype) -> HostTensor:
        """Host memory that copies from and to the device are asynchronous with, if it can be had."""
        tensor = HostTensor(numel, dtype, device=self.device)
        self.warn_of_unregistered()
        return tensor

    def partition(self, tensors: Sequence[torch.Tensor]) -> CudaPartition:
        """Parameters in the device's memory as a step's outputs.

        Args:
            tensors: Flat, contiguous, one dtype, in sub-group order; the caller keeps them.
        """
        assert all(self.holds(tensor) and tensor.is_contiguous() for tensor in tensors)
        flats = [Flat(tensor.data_ptr(), tensor.numel(), native_dtype(tensor.dtype)) for tensor in tensors]
        return CudaPartition(flats, link=self)

    def warn_of_unregistered(self) -> None:
        """Warn, once, if host memory could not be registered."""
        failure = self.device.registration_failure
        if failure and not self._warned:
            self._warned = True
            warnings.warn(
                f"Host memory could not be registered with CUDA device {self.device.index}, so that copies from and to "
                f"it block: {failure} Allow the process more locked memory (ulimit -l).",
                stacklevel=2,
            )


class GradientCopies:
    """Gradients on their way from a CUDA device into host memory, on torch's current streams.

    Args:
        link: To the device.
    """

    def __init__(self, link: CudaLink) -> None:
        self._link = link
        self._events: dict[int, native.CudaEvent] = {}
        self._pending: set[int] = set()
        self._total: torch.Tensor | None = None

    def takes(self, gradient: torch.Tensor) -> bool:
        """Whether there is something to copy, from the device."""
        return gradient.numel() > 0 and self._link.holds(gradient)

    def write(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """Start ``target = gradient``.

        Args:
            target: Contiguous, in host memory.
            gradient: As long, on the device, of any dtype.
        """
        source = gradient.to(target.dtype).contiguous()
        stream = self._link.current_stream()
        self._copy_to_host(target, source, stream)
        self._link.keep(source)
        self._note(stream)

    def add(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """Start ``target += gradient``, after all that was started before.

        The device adds, chunk by chunk, in the current stream's order: the host neither waits nor computes.
        """
        stream = self._link.current_stream()
        for other in self._pending - {stream}:
            self._events[other].hold(stream)
        if self._total is None or self._total.dtype != target.dtype:
            self._total = self._link.empty(_CHUNK_NUMEL, target.dtype)
        for begin in range(0, gradient.numel(), _CHUNK_NUMEL):
            chunk = gradient[begin : begin + _CHUNK_NUMEL]
            where = target[begin : begin + chunk.numel()]
            total = self._total[: chunk.numel()]
            self._link.device.copy_to_device(
                device=total.data_ptr(), host=where.data_ptr(), nbytes=where.nbytes, stream=stream
            )
            self._link.add(total, chunk)
            self._copy_to_host(where, total, stream)
        self._link.keep(gradient)
        self._note(stream)

    def wait(self) -> None:
        """Return when everything started so far is in host memory.

        Raises:
            CudaError: A copy failed, or work before it.
        """
        for stream in list(self._pending):
            self._events[stream].synchronize()
            self._pending.discard(stream)

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        self._link.device.copy_to_host(
            host=target.data_ptr(), device=source.data_ptr(), nbytes=target.nbytes, stream=stream
        )

    def _note(self, stream: int) -> None:
        if stream not in self._events:
            self._events[stream] = native.CudaEvent(self._link.device)
        self._events[stream].record(stream)
        self._pending.add(stream)
