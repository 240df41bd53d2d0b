"""Gives the native core access to torch tensors on a CUDA device: addresses, streams and events.

No function here waits for a whole device. Streams wait for events; the host waits only before it reads host memory.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.tensors import Flat, native_dtype
from lightning_smartinfinity.pipeline.parameters.partitions import CudaPartition

__all__ = ["CudaLink", "link_to"]


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
