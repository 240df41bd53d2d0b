"""Copies entries between a CUDA device and the pool, on two streams of this package."""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from contextlib import suppress

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.activations.cuda.clock import now_on
from lightning_smartinfinity.activations.rates import Rates
from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink

__all__ = [
    "DeviceCopies",
    "Loaded",
    "Points",
    "UnderWay",
]


class UnderWay:
    """Work that a device does in order, in bytes.

    Attributes:
        nbytes: Bytes of the work that is not known to be done.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[list[native.CudaEvent], int]] = deque()
        self.nbytes = 0

    def add(self, points: list[native.CudaEvent], nbytes: int) -> None:
        """Add work that is done when the device has reached all of ``points``."""
        self.nbytes += nbytes  # an interrupt can come only after the next line
        self._points.append((points, nbytes))

    def reap(self) -> None:
        """Remove the work that is done. Raises CudaError if some has failed."""
        while self._points:
            try:
                if not all(point.done() for point in self._points[0][0]):
                    return
            except CudaError:
                self._forget_first()
                raise
            self._forget_first()

    def wait(self, nbytes: int) -> None:
        """Wait until the device has at most ``nbytes`` bytes of work left. Raises CudaError if some has failed."""
        while self.nbytes > nbytes:
            for point in self._forget_first():
                point.synchronize()

    def _forget_first(self) -> list[native.CudaEvent]:
        points, nbytes = self._points[0]
        self.nbytes -= nbytes  # an interrupt can come only after the next line
        self._points.popleft()
        return points


Points = dict[int, native.CudaEvent]  # by handle of the stream on which each is recorded

# Memory of copies that may still run: the driver has failed to report their end.
_NEVER_FREED: list[object] = []


class Loaded:
    """Device memory into which an entry is copied.

    Args:
        memory: Memory of torch's allocator.
        event: Point after the copy.
        stream: Handle of the stream for which the allocator lent the memory.

    Attributes:
        untaken: Holds the memory until a stream of torch's waits for the copy. Before that, the memory may not be
            returned to the allocator while the copy runs.
    """

    __slots__ = ("event", "memory", "stream", "untaken")

    def __init__(self, memory: torch.Tensor, event: native.CudaEvent, *, stream: int) -> None:
        self.memory, self.event, self.stream = memory, event, stream
        self.untaken = [memory]


class _Direction:
    """A stream, and memory that must be kept until the stream's copies have run.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: native.CudaStream) -> None:
        self.stream = stream
        self._kept: deque[tuple[native.CudaEvent, object]] = deque()
        self._begun: tuple[native.CudaEvent, tuple[object, ...]] | None = None  # a copy without its point

    def begin(self, event: native.CudaEvent, *used: object) -> None:
        """Keep all memory of a copy that is about to start, until :meth:`record`.

        If an interrupt comes before :meth:`record`, all of the memory is kept until the copy has run.

        Args:
            event: Event that becomes the point after the copy.
            *used: Memory of the copy: tensors, or containers of tensors.
        """
        self._end_begun()
        self._begun = event, used

    def record(self) -> None:
        """Record the point after the copy that has started, and keep only the first of its memory."""
        self._end_begun(num_kept=1)

    def _end_begun(self, *, num_kept: int | None = None) -> None:
        if self._begun is None:
            return
        event, used = self._begun
        try:
            event.record(self.stream.handle)
        except CudaError:
            _NEVER_FREED.extend(used)
            self._begun = None
            raise
        for memory in used[:num_kept]:
            self._kept.append((event, memory))
        self._begun = None  # no interrupt comes between this and what the caller does next

    def reap(self) -> None:
        """Release the memory of copies that have run. Raises CudaError if a copy has failed."""
        self._end_begun()
        while self._kept:
            event, memory = self._kept[0]
            try:
                if not event.done():
                    return
            except CudaError:
                _NEVER_FREED.append(memory)
                self._kept.popleft()
                raise
            self._kept.popleft()

    def wait(self) -> bool:
        """Wait for the oldest copy; return whether there was one. Raises CudaError if it has failed."""
        self._end_begun()
        if not self._kept:
            return False
        event, memory = self._kept[0]
        try:
            event.synchronize()
        except CudaError:
            _NEVER_FREED.append(memory)
            self._kept.popleft()
            raise
        self._kept.popleft()  # not after an interrupt
        return True


class DeviceCopies:
    """Copies of one process between the pool and one CUDA device.

    Copies run on two streams, one for each direction. Events order them with the streams that use the tensors: the host
    waits for the device only in methods whose docstrings state it.

    Args:
        link: Link to the device.
        rates: Gets the times of copies.
    """

    def __init__(self, link: CudaLink, rates: Rates) -> None:
        self.link, self._rates = link, rates
        self._device = torch.device("cuda", link.device.index)
        streams = _streams(link)
        self._out, self._in = map(_Direction, streams)
        # Evicted tensors in order: those not yet computed, and those not yet copied.
        self._computed, self._copied = UnderWay(), UnderWay()
        # The same streams, as torch's objects.
        self._torch_out, self._torch_in = (
            torch.cuda.ExternalStream(stream.handle, device=self._device)  # type: ignore[no-untyped-call]
            for stream in streams
        )
        weakref.finalize(self, _finish_in, os.getpid(), self._out, self._in)

    def mark(self, points: Points) -> None:
        """Record the point after all work given to torch's current stream so far, in place of an earlier one."""
        stream = self.link.torch_stream()
        if stream not in points:
            points[stream] = native.CudaEvent(self.link.device)
        points[stream].record(stream)

    def copy_out(
        self, tensor: torch.Tensor, memory: torch.Tensor, *, after: Points, is_timed: bool
    ) -> native.CudaEvent:
        """Start to copy a tensor into memory of the pool, and return the point after the copy.

        The caller may drop the tensor at once: the allocator waits for the copy before it lends its memory to others.

        Args:
            tensor: Tensor on the device. If it is not contiguous, it is cloned on torch's current stream first.
            memory: Memory of the pool, kept until the copy has run.
            after: Points after the work that computes the tensor.
            is_timed: Whether to time the copy.

        Raises:
            CudaError: A call failed.
            OutOfMemoryError: The device has no memory for the clone.
        """
        if not tensor.is_contiguous():
            for point in after.values():
                point.hold(self.link.torch_stream())
            self.link.keep(tensor)
            tensor, after = tensor.contiguous(), {}
            self.mark(after)
        event = native.CudaEvent(self.link.device)
        for point in after.values():
            point.hold(self._out.stream.handle)
        tensor.record_stream(self._torch_out)
        began = now_on(self._torch_out) if is_timed else None
        self._out.begin(event, memory, tensor)
        self.link.device.copy_to_host(
            host=memory.data_ptr(),
            device=tensor.data_ptr(),
            nbytes=tensor.nbytes,
            stream=self._out.stream.handle,
        )
        self._out.record()
        if began is not None:
            self._rates.copies_out.add(began, now_on(self._torch_out), tensor.nbytes)
        self._computed.add(list(after.values()), tensor.nbytes)
        self._copied.add([event], tensor.nbytes)
        return event

    def may_copy_out(self, nbytes: int, *, most: int) -> bool:
        """Wait for the device to catch up, and return whether a copy of ``nbytes`` bytes may start.

        The host waits until at most ``most`` bytes of all evicted tensors are not computed yet. Without that wait, it
        could run ahead of the device by a whole forward, whose saved tensors would be in device memory all at once.
        The host does not wait for copies: if more than ``most`` bytes are computed and not copied, forward is faster
        than the copies, and no copy may start.

        Raises:
            CudaError: A copy, or what the device computed before it, has failed.
        """
        self._computed.wait(max(0, most - nbytes))
        self._copied.reap()
        self._computed.reap()
        return self._copied.nbytes - self._computed.nbytes <= most

    def copy_in(self, memory: torch.Tensor, nbytes: int, *, after: native.CudaEvent | None, is_timed: bool) -> Loaded:
        """Start to copy memory of the pool into new memory of the device.

        Args:
            memory: Memory of the pool, kept until the copy has run, as is the device's memory unless it is taken.
            nbytes: Bytes to copy.
            after: Point after the copy that fills the memory, if that may be in progress.
            is_timed: Whether to time the copy.

        Raises:
            CudaError: A call, or the copy that fills the memory, failed.
            OutOfMemoryError: The device is out of memory.
        """
        if after is not None and not after.done():
            after.hold(self._in.stream.handle)
        event = native.CudaEvent(self.link.device)
        current = self.link.torch_stream()
        loaded = Loaded(torch.empty(nbytes, dtype=torch.uint8, device=self._device), event, stream=current)
        # The allocator may have lent memory that earlier work of the current stream still uses.
        self._in.stream.follow(current)
        began = now_on(self._torch_in) if is_timed else None
        self._in.begin(event, (memory, loaded.untaken))
        self.link.device.copy_to_device(
            device=loaded.memory.data_ptr(), host=memory.data_ptr(), nbytes=nbytes, stream=self._in.stream.handle
        )
        if began is not None:
            self._rates.copies_in.add(began, now_on(self._torch_in), nbytes)
        self._in.record()
        return loaded

    def take(self, loaded: Loaded) -> torch.Tensor:
        """Return the memory for torch's current stream, which waits for the copy. The host does not wait."""
        current = self.link.torch_stream()
        loaded.event.hold(current)
        if current != loaded.stream:
            self.link.keep(loaded.memory)
        loaded.untaken.clear()
        return loaded.memory

    def wait_for_current(self) -> None:
        """Wait until the device has done all work given to torch's current stream so far."""
        points: Points = {}
        self.mark(points)
        for point in points.values():
            point.synchronize()

    def wait_for_copy_in(self) -> bool:
        """Wait until the oldest copy from the pool has run; return whether there was one."""
        return self._in.wait()

    def reap(self) -> None:
        """Release the memory of copies that have run. Raises CudaError if a copy has failed."""
        self._out.reap()
        self._in.reap()

    def close(self) -> None:
        """Wait for all copies."""
        _finish_in(os.getpid(), self._out, self._in)


@functools.cache
def _streams(link: CudaLink) -> tuple[native.CudaStream, native.CudaStream]:
    """Return a device's streams for copies out and in. They live as long as the process: the allocator may use them."""
    return native.CudaStream(link.device), native.CudaStream(link.device)


def _finish_in(process: int, *directions: _Direction) -> None:
    if os.getpid() != process:  # a forked child has no context
        return
    for direction in directions:
        is_left = True
        while is_left:
            with suppress(CudaError):
                is_left = direction.wait()
