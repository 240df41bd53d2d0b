"""Gives the native core access to torch tensors on a CUDA device: addresses, streams and events.

No function here waits for a whole device. Streams wait for events; the host waits only before it reads host memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.tensors import Flat, HostTensor, native_dtype
from lightning_smartinfinity.pipeline.parameters.partitions import CudaPartition

__all__ = ["CudaLink", "GradientCopies", "link_to"]

_CHUNK_NUMEL = 1 << 20


def link_to(device: torch.device) -> CudaLink | None:
    """Return the process's link to a CUDA device; None for any other, such as the host or a ROCm device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return _link(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _link(index: int) -> CudaLink:
    return CudaLink(index)


class CudaLink:
    """One CUDA device, with torch's streams on it and a stream of our own.

    Args:
        index: Torch's index of the device.

    Attributes:
        device: The native core's object for the device.
        stream: The stream that copies updated parameters.

    Raises:
        CudaError: The driver or the device cannot be used.
    """

    def __init__(self, index: int) -> None:
        self.device = native.CudaDevice(index)
        self.stream = native.CudaStream(self.device)
        self._torch_device = torch.device("cuda", index)
        # Handles of the streams that used parameters or copied gradients in this step and in the previous one. Older
        # streams are forgotten: a user may have destroyed them.
        self._used_streams: set[int] = set()
        self._used_before: set[int] = set()
        self._warned = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in the device's memory."""
        return tensor.device == self._torch_device

    def torch_stream(self) -> int:
        """Return the handle of torch's current stream."""
        return torch.cuda.current_stream(self._torch_device).cuda_stream

    def current_stream(self) -> int:
        """Return the handle of torch's current stream, which :meth:`points` includes until the end of the next step."""
        stream = self.torch_stream()
        self._used_streams.add(stream)
        return stream

    def take(self) -> None:
        """Make later copies run after the work already submitted to torch's current stream."""
        self.stream.follow(self.current_stream())

    def give(self) -> None:
        """Make later work of torch's current stream run after the copies started so far."""
        self.stream.lead(self.current_stream())

    def notice(self) -> None:
        """Begin a step: add torch's current stream to :meth:`points`, drop streams that the last step did not use."""
        self._used_before, self._used_streams = self._used_streams, set()
        self.current_stream()

    def points(self) -> list[native.CudaEvent]:
        """Record an event after the work submitted so far to each stream that was current in this step or the last.

        In backward, gradients may be copied on another stream than the one on which modules use their parameters.
        """
        self.current_stream()
        events = []
        for stream in self._used_streams | self._used_before:
            events.append(native.CudaEvent(self.device))
            events[-1].record(stream)
        return events

    def keep(self, tensor: torch.Tensor) -> None:
        """Prevent reuse of the tensor's memory until the current stream has done the work submitted so far."""
        tensor.record_stream(torch.cuda.current_stream(self._torch_device))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in the device's memory."""
        return torch.empty(numel, dtype=dtype, device=self._torch_device)

    def add(self, total: torch.Tensor, other: torch.Tensor) -> None:
        """Run ``total += other`` on the current stream."""
        total.add_(other)

    def host_tensor(self, numel: int, dtype: torch.dtype) -> HostTensor:
        """Return host memory registered with the device for asynchronous copies. If registration fails, warn once."""
        tensor = HostTensor(numel, dtype, device=self.device)
        self.warn_of_unregistered()
        return tensor

    def partition(self, tensors: Sequence[torch.Tensor]) -> CudaPartition:
        """Return parameters in the device's memory as a step's outputs.

        Args:
            tensors: Flat, contiguous tensors of one dtype, in sub-group order; the caller keeps them alive.
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
    """Copies gradients from a CUDA device into host memory, on torch's current streams.

    Args:
        link: Link to the device.
    """

    def __init__(self, link: CudaLink) -> None:
        self._link = link
        self._events: dict[int, native.CudaEvent] = {}
        self._pending: set[int] = set()
        self._total: torch.Tensor | None = None

    def takes(self, gradient: torch.Tensor) -> bool:
        """Return whether the gradient has elements and is on the device."""
        return gradient.numel() > 0 and self._link.holds(gradient)

    def write(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """Start ``target = gradient``.

        Args:
            target: Contiguous tensor in host memory.
            gradient: Tensor of the same length on the device, of any dtype.
        """
        source = gradient.to(target.dtype).contiguous()
        stream = self._link.current_stream()
        self._copy_to_host(target, source, stream)
        self._link.keep(source)
        self._record_event(stream)

    def add(self, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """Start ``target += gradient``, which runs after all copies started before.

        The device adds, chunk by chunk, in the current stream's order: the host neither waits nor computes.
        """
        stream = self._link.current_stream()
        # Copies on other streams may still be writing the target.
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
        self._record_event(stream)

    def point(self) -> native.CudaEvent:
        """Return the point after all copies started so far on the current stream."""
        event = native.CudaEvent(self._link.device)
        event.record(self._link.current_stream())
        return event

    def wait(self) -> None:
        """Wait until all copies started so far have completed.

        Raises:
            CudaError: A copy or earlier work in its stream failed.
        """
        for stream in list(self._pending):
            self._events[stream].synchronize()
            self._pending.discard(stream)

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor, stream: int) -> None:
        self._link.device.copy_to_host(
            host=target.data_ptr(), device=source.data_ptr(), nbytes=target.nbytes, stream=stream
        )

    def _record_event(self, stream: int) -> None:
        if stream not in self._events:
            self._events[stream] = native.CudaEvent(self._link.device)
        self._events[stream].record(stream)
        self._pending.add(stream)
