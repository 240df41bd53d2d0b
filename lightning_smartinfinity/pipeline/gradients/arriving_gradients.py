"""Gradients on their way from a CUDA device to host memory."""

from __future__ import annotations

import time
from collections import deque

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.layout.gradient_ring import MOST_ON_DEVICE_BYTES, SLOT_BYTES, ring_bytes
from lightning_smartinfinity.pipeline.layout.tensors import DTYPES, native_dtype
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink

__all__ = ["ArrivingGradients"]

_NOT_STARTED = 1 << 62


class ArrivingGradients:
    """Copies gradients from a CUDA device through a ring of registered memory, and adds them to host memory.

    Gradients travel in their own dtype, on a stream of the ring's own. Threads of the core add and square them: the
    host waits for neither, and no bit depends on their number. All methods are called by one thread at a time.

    Args:
        link: Link to the device.
        nbytes: Bytes of all gradients of the partition.
        num_threads: Number of threads that add.
    """

    def __init__(self, link: CudaLink, *, nbytes: int, num_threads: int) -> None:
        self._link = link
        self._ring = native.GradientRing(
            link.device,
            slot_bytes=SLOT_BYTES,
            num_slots=ring_bytes(nbytes) // SLOT_BYTES,
            num_threads=num_threads,
            most_bytes=MOST_ON_DEVICE_BYTES,
        )
        link.warn_of_unregistered()
        self._wait_seconds = 0.0
        self._sources: deque[_Source] = deque()  # keeps the device's memory until it was copied

    def takes(self, gradient: torch.Tensor) -> bool:
        """Return whether the gradient has elements, is on the device, and has a dtype that the core knows."""
        return gradient.numel() > 0 and gradient.dtype in DTYPES and self._link.holds(gradient)

    def start(self, parameter: int, target: torch.Tensor, gradient: torch.Tensor, *, adds: bool) -> int:
        """Start ``target = gradient``, or ``target += gradient``, after all that was started for the parameter before.

        It waits only if more than ``MOST_ON_DEVICE_BYTES`` are on their way.

        Args:
            parameter: Parameter index.
            target: Contiguous tensor in host memory.
            gradient: Tensor of the same length that :meth:`takes` accepts. The caller may drop it, but not change it.
            adds: Whether to add the gradient.

        Returns:
            The gradient's ticket, for :meth:`is_done` and :meth:`wait_for_room`.
        """
        while self._sources and self._ring.done(self._sources[0].ticket):
            self._sources.popleft()
        source = _Source(gradient.contiguous().resolve_neg())
        self._sources.append(source)  # first, so that an interrupt does not free the memory during the copy
        source.ticket = self._ring.push(
            key=parameter,
            source=source.tensor.data_ptr(),
            numel=source.tensor.numel(),
            dtype=native_dtype(gradient.dtype),
            sum=target.data_ptr(),
            sum_dtype=native_dtype(target.dtype),
            adds=adds,
            after=self._link.current_stream(),
        )
        return source.ticket

    def is_done(self, ticket: int) -> bool:
        """Return whether the ticket's gradient, and all that were started before it, have arrived or are lost."""
        return self._ring.done(ticket)

    def wait(self) -> None:
        """Wait until all gradients have arrived.

        Raises:
            CudaError: A copy has failed since the last :meth:`reset`.
        """
        self._ring.wait()

    def wait_for_room(self, ticket: int) -> None:
        """Do the same for the ticket's gradient and those before it, and count the time.

        Backward needs the host memory of that gradient for others.

        Raises:
            CudaError: As :meth:`wait`.
        """
        began = time.monotonic()
        self._ring.wait(ticket)
        self._wait_seconds += time.monotonic() - began

    def point(self) -> native.ReadyPoint:
        """Return the point after which all gradients started so far have arrived."""
        return self._ring.point()

    def take_squares(self) -> list[tuple[int, float]]:
        """Return, and forget, each arrived gradient's parameter and the sum of squares of its new sum, in order."""
        return self._ring.take_squares()

    def reset(self) -> None:
        """Wait until nothing is on its way; forget squares and failures."""
        self._ring.reset()
        self._sources.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of registered memory."""
        return self._ring.nbytes

    @property
    def wait_seconds(self) -> float:
        """Time that :meth:`start` and :meth:`wait_for_room` waited."""
        return self._ring.wait_seconds + self._wait_seconds

    def close(self) -> None:
        """Wait until nothing is on its way, and free the memory and the threads; idempotent."""
        self._ring.close()
        self._sources.clear()


class _Source:
    """A gradient on the device, and its ticket once it was pushed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.ticket = _NOT_STARTED
