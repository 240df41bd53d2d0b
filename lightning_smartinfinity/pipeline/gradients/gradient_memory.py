"""Memory for all gradients, or for a budget of bytes with the other gradients on storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import SmartInfinityError, StorageError, UnsupportedError
from lightning_smartinfinity.pipeline.gradients.arriving_gradients import ArrivingGradients
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.layout.tensors import HostTensor
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks
from lightning_smartinfinity.storage.tensors.tensor_store import StoredTensor, TensorStore

__all__ = ["GradientMemory", "GradientWindows"]

_SHARE_TOGETHER = 4  # gradients that arrive together hold at most 1/4 of the budget at once
_SHARE_BEFORE_SPILLING = 2  # windows are spilled ahead once more than 1/2 of the budget is held
_SHARE_OF_GRANULE = 64  # the unit of memory returned to the system is at most 1/64 of the budget
_LARGEST_GRANULE = 2 << 20  # a huge page


def _gradients_are_gone() -> UnsupportedError:
    return UnsupportedError(
        "A gradient was read or changed that is gone: the update within backward had given it up, or it could not be "
        "read from storage.",
        "Change nothing between backward and step, leave gradient_bytes out, or use overlap='forward'.",
    )


class GradientMemory:
    """Memory for all gradients of a rank.

    It is one mapping in huge pages that forked children do not inherit.

    Args:
        numel: Number of elements.
        dtype: Dtype of the gradients.

    Attributes:
        tensor: All elements.
    """

    budget_bytes: int | None = None
    """Most bytes to hold in memory; None means that all gradients are in memory."""

    spills_ahead = True
    """Whether to spill windows before the budget is used up; False if the update will release them soon."""

    is_damaged = False
    """Whether some content could not be read since the last :meth:`reset`."""

    arriving: ArrivingGradients | None = None
    """Gradients on their way into this memory, if they come from a CUDA device."""

    tensor: torch.Tensor

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.tensor = HostTensor(numel, dtype).tensor

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory."""
        return self.tensor.nbytes

    def hold(self, ranges: Iterable[tuple[int, int]], *, changes: bool) -> None:
        """Hold elements in memory until the next call.

        Args:
            ranges: First element, and one past the last one, of each range.
            changes: Whether the caller will write to the elements.
        """

    def arrives(self, where: tuple[int, int], ticket: int) -> None:
        """Record that a gradient is on its way into held elements: they stay in memory until it has arrived.

        Args:
            where: First element, and one past the last one.
            ticket: The gradient's ticket of ``arriving``.
        """

    def cut(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Cut ``[begin, end)`` into parts that a pass over all of it holds one after the other."""
        return [(begin, end)]

    def of_step(self, tasklet: int, *, last_use: bool) -> native.GradientWindow | None:
        """Return the gradient window that the update of a tasklet uses; None if the gradient stays in memory.

        Args:
            tasklet: Index of the tasklet, whose gradient is complete.
            last_use: Whether the update is the last use of the gradient.
        """
        return None

    def take_failure(self) -> SmartInfinityError | None:
        """Return and clear the first error of a spill or read; None if there is none. Other ranks do not know of it.

        Elements that could not be spilled are still in memory. Elements that could not be read are lost.
        """
        return None

    def counters(self) -> native.Counters | None:
        """Return the cumulative counters of spills and reads; None if this memory never spills."""
        return None

    def reset(self) -> None:
        """Discard all content, except gradients that the step in flight has still to use."""

    def step_rolled_back(self) -> bool:
        """Record that the update has stopped and uses no more gradients.

        Returns:
            Whether content was lost since the last :meth:`reset`.
        """
        return False

    def close(self) -> None:
        """Close the store of the memory; idempotent. The memory lives as long as a tensor over it."""


class GradientWindows(GradientMemory):
    """A flat tensor of gradients, cut into one window for each tasklet.

    Every element always has an address, but only some windows occupy memory. A window is *held* while its content is in
    memory, and *stored* while its content is on storage. It can be both; before its first write it is neither. If more
    bytes are held than the budget, the least recently used windows are spilled: written to storage and dropped from
    memory.

    During a step the update itself reads stored windows, and drops each window's memory after use (:meth:`of_step`).

    Args:
        layout: The partition.
        dtype: Dtype of the gradients.
        budget_bytes: Most bytes to hold, unless a single call needs more.
        store: Store of the spilled windows. It is closed with this object.
        await_use: Waits until the update in flight has used a tasklet's gradient or has failed; returns at once without
            an update.

    Attributes:
        tensor: All elements. Only held elements may be read or written.
    """

    def __init__(
        self,
        layout: PartitionLayout,
        dtype: torch.dtype,
        *,
        budget_bytes: int,
        store: TensorStore,
        await_use: Callable[[int], None],
    ) -> None:
        self._layout, self._itemsize = layout, dtype.itemsize
        self.budget_bytes: int = budget_bytes
        self._store, self._await_use = store, await_use
        nbytes = layout.numel * dtype.itemsize
        granule = min(_LARGEST_GRANULE, 1 << max(12, (budget_bytes // _SHARE_OF_GRANULE).bit_length() - 1))
        self._memory = native.GradientMemory(max(1, whole_blocks(nbytes)), granule=granule)
        self._bytes = torch.frombuffer(self._memory.memoryview(), dtype=torch.uint8)
        self.tensor = self._bytes[:nbytes].view(dtype)
        self._places: dict[int, StoredTensor] = {}  # of windows that have ever been stored
        # Windows in memory, each in at most one of the two dictionaries, least recently used first.
        self._held: dict[int, None] = {}
        self._leaving: dict[int, int] = {}  # windows being spilled, with the tickets of their writes
        self._held_bytes = self._leaving_bytes = 0
        self._stored: set[int] = set()
        self._arriving: dict[int, int] = {}  # windows that gradients are on their way into, with their tickets
        self._in_step: dict[int, native.GradientWindow] = {}
        self._forgotten: dict[int, None] = {}  # windows in memory that only the step in flight needs
        self._given_up: set[int] = set()  # windows whose content is lost, or left to the step in flight
        self._reading: dict[int, int] = {}  # tickets of reads into windows that are not held yet
        self._failure: SmartInfinityError | None = None
        self._outdated: list[int] = []  # tickets of writes whose content is no longer needed

    @property
    def memory_bytes(self) -> int:
        return self._held_bytes + self._leaving_bytes + sum(map(self._bytes_of, self._still_needed()))

    def counters(self) -> native.Counters:
        return self._store.counters()

    def take_failure(self) -> SmartInfinityError | None:
        failure, self._failure = self._failure, None
        return failure

    def hold(self, ranges: Iterable[tuple[int, int]], *, changes: bool) -> None:
        windows = sorted({window for begin, end in ranges for window in self._layout.tasklets_between(begin, end)})
        for window in windows:
            self._finish_read(window)
            self._await_use_of(window)
        absent = [window for window in windows if window not in self._held and window not in self._leaving]
        keep = set(windows)
        with self._noting_failure():
            self._make_room(sum(map(self._bytes_of, absent)), keep=keep)
            if keep & self._given_up:
                raise _gradients_are_gone()
        for window in absent:
            self._memory.take(self._offset_of(window), self._bytes_of(window))
            if window in self._stored:
                self._reading[window] = self._store.read(self._places[window], self._slice(window))
        for window in absent:
            self._finish_read(window)  # until then, after an interrupt, the window counts as stored only
        for window in windows:
            with self._noting_failure():
                self._enter(window)
        if changes:
            self._stored -= keep
        with self._noting_failure():
            while (
                self.spills_ahead
                and self._held_bytes > self.budget_bytes // _SHARE_BEFORE_SPILLING
                and self._begin_spill(keep)
            ):
                pass

    def cut(self, begin: int, end: int) -> list[tuple[int, int]]:
        numel = self._layout.extents.tasklet_numel
        windows = self._layout.tasklets_between(begin, end)
        return [(max(begin, w * numel), min(end, (w + 1) * numel)) for w in windows]

    def arrives(self, where: tuple[int, int], ticket: int) -> None:
        self._arriving |= dict.fromkeys(self._layout.tasklets_between(*where), ticket)

    def groups(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Sequence[int]]:
        """Yield groups of indices into ``ranges``; the ranges of a group fit into memory together."""
        group: list[int] = []
        nbytes = 0
        for index, (begin, end) in enumerate(ranges):
            more = sum(map(self._bytes_of, self._layout.tasklets_between(begin, end)))
            if group and nbytes + more > self.budget_bytes // _SHARE_TOGETHER:
                yield group
                group, nbytes = [], 0
            group.append(index)
            nbytes += more
        yield group

    def of_step(self, tasklet: int, *, last_use: bool) -> native.GradientWindow:
        store, extent, drops = None, None, last_use
        if tasklet not in self._held and tasklet not in self._leaving and tasklet in self._stored:
            # The update reads the window from storage into its ring, so nothing of it has to stay in this memory.
            store, extent, drops = self._store.core, self._places[tasklet].extent, True
        self._in_step[tasklet] = native.GradientWindow(
            self._memory,
            offset=self._offset_of(tasklet),
            nbytes=self._bytes_of(tasklet),
            store=store,
            extent=extent,
            drops=drops,
        )
        if last_use:
            self._give_up(tasklet)
        return self._in_step[tasklet]

    def _give_up(self, window: int) -> None:
        """Hand a window over to the step in flight, its last user."""
        if window in self._leaving:
            self._outdated.append(self._leaving.pop(window))
            self._leaving_bytes -= self._bytes_of(window)
            self._forgotten[window] = None
        elif window in self._held:
            del self._held[window]
            self._held_bytes -= self._bytes_of(window)
            self._forgotten[window] = None
        self._stored.discard(window)
        self._given_up.add(window)

    def reset(self) -> None:
        self._finish_outdated()
        for window in list(self._reading):
            self._finish_read(window)
        for window in [*self._held, *self._leaving]:
            if self._is_needed(window):
                self._forgotten[window] = None
            else:
                self._drop(window)
        self._outdated += self._leaving.values()
        self._held.clear()
        self._leaving.clear()
        self._held_bytes = self._leaving_bytes = 0
        self._stored.clear()
        self._arriving.clear()
        self._given_up.clear()
        self._failure = None
        self.is_damaged = False

    def step_rolled_back(self) -> bool:
        for window in self._in_step:
            if window not in self._held and window not in self._leaving:
                self._drop(window)  # read by the update, or kept only for it
        self._in_step.clear()
        self._forgotten.clear()
        return bool(self._given_up)

    def close(self) -> None:
        self._outdated += self._leaving.values()
        self._leaving.clear()
        for ticket in self._outdated:
            with suppress(StorageError):  # the content is no longer needed
                self._store.finish(ticket)
        self._outdated.clear()
        for window in list(self._reading):
            self._finish_read(window)
        self._store.close()

    def _finish_read(self, window: int) -> None:
        """Wait for a read into a window. If the read fails, the window's content is lost."""
        ticket = self._reading.get(window)
        if ticket is None:
            return
        try:
            self._store.finish(ticket)
        except SmartInfinityError as error:
            self._failure = self._failure or error
            self._given_up.add(window)
            self.is_damaged = True
        del self._reading[window]  # not in a finally clause: after an interrupt, the read is still in flight

    def _await_use_of(self, window: int) -> None:
        """Wait until the update has used a window; return at once if it does not use it."""
        if self._is_needed(window):
            self._await_use(window)
        self._in_step.pop(window, None)
        if window in self._forgotten:
            del self._forgotten[window]
            self._drop(window)  # has no effect if the update has dropped it after its last use

    def _enter(self, window: int) -> None:
        """Hold a window, as the most recently used one."""
        if window in self._leaving:
            self._end_spill(window)
        elif window not in self._held:
            self._held_bytes += self._bytes_of(window)
        self._held.pop(window, None)
        self._held[window] = None

    def _make_room(self, nbytes: int, *, keep: set[int]) -> None:
        """Drop windows until ``nbytes`` more fit into the budget, or no window can be dropped."""
        while self.memory_bytes + nbytes > self.budget_bytes:
            stored = next((w for w in self._held if w in self._stored and self._may_go(w, keep)), None)
            leaving = next((w for w in self._leaving if self._may_go(w, keep)), None)
            if stored is not None:
                del self._held[stored]
                self._held_bytes -= self._bytes_of(stored)
                self._drop(stored)
            elif leaving is not None:
                self._end_spill(leaving)
            elif (needed := self._first_needed(keep)) is not None:
                self._await_use_of(needed)
            elif not self._begin_spill(keep) and not self._await_arrival(keep):
                return

    def _first_needed(self, keep: set[int]) -> int | None:
        """Return the first window in memory that the update has still to use, after forgetting those already used."""
        while self._in_step and not self._is_needed(first := next(iter(self._in_step))):
            self._await_use_of(first)
        return next((w for w in self._in_step if w not in keep and self._is_needed(w) and self._has(w)), None)

    def _begin_spill(self, keep: set[int]) -> bool:
        """Start to spill the least recently used window. Return whether there was one."""
        oldest = next((w for w in self._held if w not in self._stored and self._may_go(w, keep)), None)
        if oldest is None:
            return False
        nbytes = self._bytes_of(oldest)
        if oldest not in self._places:
            self._places[oldest] = self._store.add(nbytes)
        ticket = self._store.write(self._places[oldest], self._slice(oldest), io_class=native.IoClass.WRITE_BEHIND)
        del self._held[oldest]
        self._leaving[oldest] = ticket
        self._held_bytes -= nbytes
        self._leaving_bytes += nbytes
        return True

    def _await_arrival(self, keep: set[int]) -> bool:
        """Wait for the first gradient on its way into a window that may be dropped. Return whether there was one."""
        window = next((w for w in self._held if w not in keep and self._is_arriving(w)), None)
        if window is not None and self.arriving is not None:
            self.arriving.wait_for_room(self._arriving[window])
        return window is not None

    def _is_arriving(self, window: int) -> bool:
        ticket = self._arriving.get(window)
        if ticket is not None and self.arriving is not None and not self.arriving.is_done(ticket):
            return True
        self._arriving.pop(window, None)
        return False

    def _end_spill(self, window: int) -> None:
        """Wait until a window is on storage. It is held again, as the least recently used."""
        ticket = self._leaving.pop(window)
        self._leaving_bytes -= self._bytes_of(window)
        self._held_bytes += self._bytes_of(window)
        self._held = {window: None, **self._held}
        self._store.finish(ticket)
        self._stored.add(window)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Keep an error for :meth:`take_failure`: if one rank raised within backward, the others would hang."""
        try:
            yield
        except SmartInfinityError as error:
            self._failure = self._failure or error

    def _may_go(self, window: int, keep: set[int]) -> bool:
        return window not in keep and not self._is_needed(window) and not self._is_arriving(window)

    def _is_needed(self, window: int) -> bool:
        """Return whether the update has still to use the window."""
        used = self._in_step.get(window)
        return used is not None and not used.is_used

    def _has(self, window: int) -> bool:
        return window in self._held or window in self._leaving or window in self._forgotten

    def _still_needed(self) -> list[int]:
        """Return the windows in memory that only the update needs, after dropping the used ones."""
        for window in [window for window in self._forgotten if not self._is_needed(window)]:
            self._await_use_of(window)
        return list(self._forgotten)

    def _finish_outdated(self) -> None:
        unfinished = []
        for ticket in self._outdated:
            if self._store.done(ticket):
                with suppress(StorageError):  # the content is no longer needed
                    self._store.finish(ticket)
            else:
                unfinished.append(ticket)
        self._outdated = unfinished

    def _drop(self, window: int) -> None:
        self._memory.drop(self._offset_of(window), self._bytes_of(window))

    def _slice(self, window: int) -> torch.Tensor:
        return self._bytes[self._offset_of(window) :][: self._bytes_of(window)]

    def _offset_of(self, window: int) -> int:
        return self._layout.tasklets[window].offset * self._itemsize

    def _bytes_of(self, window: int) -> int:
        return whole_blocks(self._layout.tasklets[window].numel * self._itemsize)
