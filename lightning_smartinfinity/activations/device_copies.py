"""Copies entries between a CUDA device and the pool, on streams of our own."""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from contextlib import suppress

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.transfer.cuda import CudaLink

__all__ = ["DeviceCopies", "Loaded", "Points"]

Points = dict[int, native.CudaEvent]  # by handle of the stream in which each lies

# Memory that a copy may use of which nobody knows when it ends, because the driver has refused to say so.
_NEVER_FREED: list[torch.Tensor] = []


class Loaded:
    """Device memory into which an entry is copied.

    Args:
        memory: The memory, of torch's allocator.
        event: Point behind the copy.

    Attributes:
        was_taken: Whether a stream of torch's waits for the copy, so that the allocator may have the memory back.
    """

    __slots__ = ("event", "memory", "was_taken")

    def __init__(self, memory: torch.Tensor, event: native.CudaEvent) -> None:
        self.memory, self.event = memory, event
        self.was_taken = False


class _Direction:
    """A stream, and memory that must stay until its copies have run.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: native.CudaStream) -> None:
        self.stream = stream
        # Entries may be dropped in any thread at any time, which adds memory without a lock.
        self._kept: deque[tuple[native.CudaEvent, torch.Tensor]] = deque()

    def keep(self, memory: torch.Tensor, event: native.CudaEvent) -> None:
        """Keep memory until the copies before a point have run."""
        self._kept.append((event, memory))

    def record(self, event: native.CudaEvent, *used: torch.Tensor) -> None:
        """Set a point behind a copy that has started, and keep memory that it uses.

        Args:
            event: What becomes the point.
            *used: All memory that the copy uses. The first one is kept, the others only if there is no point.
        """
        try:
            event.record(self.stream.handle)
        except CudaError:
            _NEVER_FREED.extend(used)
            raise
        self.keep(used[0], event)

    def reap(self) -> None:
        """Keep memory no longer whose copies have run. Raises CudaError if one has failed."""
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
        if not self._kept:
            return False
        event, memory = self._kept.popleft()
        try:
            event.synchronize()
        except CudaError:
            _NEVER_FREED.append(memory)
            raise
        return True


class DeviceCopies:
    """Copies of one process between the pool and one CUDA device.

    Copies run on two streams of ours, one for each direction. Their order with the streams that use the tensors is that
    of events: the host waits for the device only where a method says so.

    Args:
        link: Link to the device.
    """

    def __init__(self, link: CudaLink) -> None:
        self.link = link
        self._device = torch.device("cuda", link.device.index)
        streams = _streams(link)
        self._out, self._in = map(_Direction, streams)
        self._out_of_torch = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            streams[0].handle, device=self._device
        )
        weakref.finalize(self, _finish_in, os.getpid(), self._out, self._in)

    def mark(self, points: Points) -> None:
        """Move or add the point behind all work that torch's current stream was given so far."""
        stream = self.link.torch_stream()
        if stream not in points:
            points[stream] = native.CudaEvent(self.link.device)
        points[stream].record(stream)

    def copy_out(self, tensor: torch.Tensor, memory: torch.Tensor, *, after: Points) -> native.CudaEvent:
        """Start to copy a tensor into memory of the pool, and return the point behind the copy.

        The caller may drop the tensor at once: the allocator waits for the copy before it lends its memory to others.

        Args:
            tensor: Tensor on the device. If it is not contiguous, it is cloned on torch's current stream first.
            memory: Memory of the pool, kept until the copy has run.
            after: Points behind the work that computes the tensor.

        Raises:
            CudaError: A call failed.
            OutOfMemoryError: There is no memory for the clone.
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
        tensor.record_stream(self._out_of_torch)
        self.link.device.copy_to_host(
            host=memory.data_ptr(),
            device=tensor.data_ptr(),
            nbytes=tensor.nbytes,
            stream=self._out.stream.handle,
        )
        self._out.record(event, memory, tensor)
        return event

    def copy_in(self, memory: torch.Tensor, nbytes: int, *, after: native.CudaEvent | None) -> Loaded:
        """Start to copy memory of the pool into new memory of the device.

        Args:
            memory: Memory of the pool, kept until the copy has run.
            nbytes: Bytes to copy.
            after: Point behind the copy that fills the memory, if that may be in progress.

        Raises:
            CudaError: A call, or the copy that fills the memory, failed.
            OutOfMemoryError: The device has no memory.
        """
        if after is not None and not after.done():
            after.hold(self._in.stream.handle)
        event = native.CudaEvent(self.link.device)
        loaded = Loaded(torch.empty(nbytes, dtype=torch.uint8, device=self._device), event)
        # The allocator may have lent what earlier work of the current stream still uses.
        self._in.stream.follow(self.link.torch_stream())
        self.link.device.copy_to_device(
            device=loaded.memory.data_ptr(), host=memory.data_ptr(), nbytes=nbytes, stream=self._in.stream.handle
        )
        self._in.record(event, memory, loaded.memory)
        return loaded

    def take(self, loaded: Loaded) -> torch.Tensor:
        """Return device memory that torch's current stream may use: it waits for the copy, and the host does not."""
        loaded.event.hold(self.link.torch_stream())
        self.link.keep(loaded.memory)  # it may be of another stream's memory
        loaded.was_taken = True
        return loaded.memory

    def drop(self, loaded: Loaded) -> None:
        """Let the allocator have memory back, as soon as the copy into it has run. Any thread may call it."""
        if not loaded.was_taken:
            self._in.keep(loaded.memory, loaded.event)

    def wait_for_current(self) -> None:
        """Wait until the device has done all work that torch's current stream was given so far."""
        points: Points = {}
        self.mark(points)
        for point in points.values():
            point.synchronize()

    def wait_for_copy_in(self) -> bool:
        """Wait until the oldest copy from the pool has run; return whether there was one."""
        return self._in.wait()

    def reap(self) -> None:
        """Give back memory of the pool that copies have used. Raises CudaError if one has failed."""
        self._out.reap()
        self._in.reap()

    def close(self) -> None:
        """Wait for all copies."""
        _finish_in(os.getpid(), self._out, self._in)


@functools.cache
def _streams(link: CudaLink) -> tuple[native.CudaStream, native.CudaStream]:
    """Return a device's streams for copies out and in. The allocator may ask for them as long as the process lives."""
    return native.CudaStream(link.device), native.CudaStream(link.device)


def _finish_in(process: int, *directions: _Direction) -> None:
    if os.getpid() != process:  # a forked child has no context
        return
    for direction in directions:
        is_left = True
        while is_left:
            with suppress(CudaError):
                is_left = direction.wait()
