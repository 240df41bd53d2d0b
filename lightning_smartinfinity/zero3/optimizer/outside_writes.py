"""Updates the masters on storage after parameters are written outside of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.optimizer.update_in_flight import UpdateInFlight
from lightning_smartinfinity.zero3.parameters.partitioned_parameter import notify_of_writes
from lightning_smartinfinity.zero3.parameters.unrounded import take_full, waiting
from lightning_smartinfinity.zero3.ranks.collectives import raising_together, sum_over_ranks
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["OutsideWrites", "Precise", "windows_of"]

Precise: TypeAlias = Callable[[ParameterSlice, int, int], torch.Tensor | None]
"""Function of a slice, a first element and a count; returns these values (fp32, on the CPU), or None if unknown."""

# Number of elements whose masters are compared at once.
_WINDOW_NUMEL = 1 << 22


class OutsideWrites:
    """Updates the masters on storage after writes that bypass the optimizer.

    Every such write ends in ``param.partition``, which calls the callback set by :meth:`watch`. Where the partition
    still holds the rounded value of a master, the master keeps every bit, so gathering without writing changes nothing.

    Every method is collective, and makes the same number of commits on every rank.

    Args:
        rank_state: The partition and its handler.
        update: The update in flight, which is drained before masters are read or written.

    Attributes:
        unrecorded: Half a sentence naming a change that training records do not hold; None if there is none.
    """

    def __init__(self, rank_state: RankState, update: UpdateInFlight) -> None:
        self._rank_state = rank_state
        self._partition = rank_state.partition
        self._update = update
        self._deferred: set[int] | None = None
        self.unrecorded: str | None = None

    def watch(self, parameters: Iterable[ZeroParameter]) -> None:
        """Watch for writes to these parameters. Storage holds no masters of parameters that are not trained."""
        for param in parameters:
            notify_of_writes(param, self._note_writes)

    @contextmanager
    def precisely(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Defer writes made in the body, then apply all of them to the masters at the precision of ``values``.

        Args:
            values: Full parameters by name. Where the partition holds their value rounded to its dtype, the master
                becomes the unrounded value.
        """
        self._deferred = set()
        try:
            yield
            written = self._deferred
        finally:
            self._deferred = None
        self._refresh(written, self._in_full(values))

    def refresh_all(self) -> None:
        """Set every master to exactly the value of its parameter; moments and step counts stay."""
        layout = self._partition.layout
        for begin, end in windows_of(layout, range(len(layout.tasklets))):
            self._modify(begin, self._partition.read(begin, end).float().numpy())

    def bring_in(self, parameters: Iterable[ZeroParameter]) -> None:
        """Set new masters to fp32 values that were written to 16-bit parameters before the training."""
        layout = self._partition.layout
        for param in parameters:
            if param.ds_id in self._partition.index and (full := take_full(param)) is not None:
                index = self._partition.index[param.ds_id]
                self._refresh([index], self._in_full({layout.parameters[index].name: full}))

    def bring_in_slices(self, written: Iterable[int], precise: Precise) -> None:
        """Set masters of this rank's slices to given values, where the parameters hold these values rounded.

        Args:
            written: Indices of the parameters, the same on all ranks.
            precise: Function that returns the values.
        """
        self._refresh(written, precise)

    def _known_precisely(self, params: Iterable[ZeroParameter]) -> Precise:
        index, layout = self._partition.index, self._partition.layout
        given = {param.ds_id: full for param in params if (full := waiting(param)) is not None}
        return self._in_full({layout.parameters[index[key]].name: full for key, full in given.items() if key in index})

    def _in_full(self, values: Mapping[str, torch.Tensor]) -> Precise:
        """Return a function that reads this rank's slices of the full parameters."""
        rank = dist.get_rank(self._partition.group)

        def precise(own: ParameterSlice, begin: int, numel: int) -> torch.Tensor | None:
            full = values.get(own.name)
            if full is None:
                return None
            return full.detach().reshape(-1)[rank * own.numel + begin :][:numel].to("cpu", torch.float32)

        return precise

    def _note_writes(self, params: Iterable[ZeroParameter]) -> None:
        if not self._rank_state.is_open:
            return
        params = list(params)
        written = self._partition.indices_of(params)
        if len(written) < len({param.ds_id for param in params}):
            self.unrecorded = "a parameter that is not trained was written, and storage holds none of these"
        if self._deferred is not None:
            self._deferred |= written
        else:
            self._refresh(written, self._known_precisely(params))

    def _refresh(self, written: Iterable[int], precise: Precise) -> None:
        layout = self._partition.layout
        touched = {tasklet for index in written for tasklet in layout.tasklets_of(slice(index, index + 1))}
        windows = list(windows_of(layout, sorted(touched)))
        try:
            self._refresh_windows(windows, precise)
        except SmartInfinityError:
            # Parameters must not differ from their masters when the caller continues.
            with suppress(SmartInfinityError):
                self._restore_from_masters(windows)
            raise

    def _restore_from_masters(self, windows: Iterable[tuple[int, int]]) -> None:
        for begin, end in windows:
            self._partition.write(begin, torch.from_numpy(self._masters_between(begin, end)))

    def _masters_between(self, begin: int, end: int) -> NDArray[np.float32]:
        masters: NDArray[np.float32] = np.empty(0, np.float32)
        with raising_together(self._partition.group):
            masters = self._update.drained_handler().state.read_range(begin, end, names=["master"])["master"]
        return masters

    def _refresh_windows(self, windows: Iterable[tuple[int, int]], precise: Precise) -> None:
        for begin, end in windows:
            masters = self._masters_between(begin, end)
            changed = self._merge(begin, torch.from_numpy(masters), precise)
            if sum_over_ranks(float(changed), self._partition.group) > 0:
                self._modify(begin, masters)

    def _merge(self, begin: int, masters: torch.Tensor, precise: Precise) -> bool:
        """Update masters in place from the parameters and ``precise``; return whether any bit changed."""
        current = self._partition.read(begin, begin + len(masters))
        before = masters.clone()
        masters.copy_(torch.where(masters.to(current.dtype) == current, masters, current.float()))
        for own, first, last in self._partition.layout.real_ranges_between(begin, begin + len(masters)):
            values = precise(own, first - own.offset, last - first)
            if values is None:
                continue
            where = slice(first - begin, last - begin)
            agrees = values.to(current.dtype) == current[where]
            masters[where] = torch.where(agrees, values, masters[where])
        return not torch.equal(masters.view(torch.int32), before.view(torch.int32))

    def _modify(self, begin: int, masters: NDArray[np.float32]) -> None:
        together = partial(raising_together, self._partition.group)
        self._update.drained_handler().state.modify_range(begin, {"master": masters}, together=together)


def windows_of(layout: PartitionLayout, tasklets: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive tasklets, given in order, as element ranges of the flat partition."""
    numel = layout.extents.tasklet_numel
    per_window = max(1, _WINDOW_NUMEL // numel)
    # In a run of consecutive tasklets, number minus count is constant.
    for _, run in groupby(enumerate(tasklets), key=lambda pair: (pair[1] - pair[0], pair[1] // per_window)):
        members = [tasklet for _, tasklet in run]
        yield members[0] * numel, min((members[-1] + 1) * numel, layout.numel)
