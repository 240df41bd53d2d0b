"""Writes state in host memory to storage at an interval (``TransferConfig(durability="interval")``).

Between two writes, generations exist in memory only, except for the one written last: it stays whole on storage, with
its training record, and an interrupted training resumes from it.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.errors import SmartInfinityError, StorageFullError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.settings import TransferConfig, transfer as transfer_settings
from lightning_smartinfinity.storage.state.state_store import Together
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.ranks.collectives import failing_together, gather, raising_together, sum_over_ranks

__all__ = ["Persistence", "begin_write_back"]

_log = logging.getLogger(__name__)


class _Write(Protocol):
    def __call__(self, *, together: Together) -> None: ...


_AS_STEP = "durability='interval' works as 'step', which writes all optimizer state in every step"


def begin_write_back(handler: TransferHandler, transfer: TransferConfig, group: ProcessGroup | None) -> None:
    """Write resident state back from now on, if the settings ask for it and every rank can. Collective.

    Rank 0 reports if it is not done.

    Args:
        handler: The open handler, whose state is complete on storage.
        transfer: The transfer settings.
        group: Process group of all ranks.

    Raises:
        StorageError: A state file of some rank cannot be extended, for a reason other than a full disk.
    """
    if transfer.interval is None:
        return
    is_first = dist.get_rank(group) == 0
    if sum_over_ranks(handler.num_resident == 0, group):
        if is_first:
            _log.info("%s: no state is in host memory%s.", _AS_STEP, _of_some(group))
        return
    problem = None
    with raising_together(group):
        try:
            handler.write_back()
        except StorageFullError as error:
            problem = error.problem
    problems = [each for each in gather(problem, group) if each is not None]
    if problems:
        if problem is None:
            handler.write_through()
        if is_first:
            warnings.warn(f"{_AS_STEP}: no room for a third place of state. {problems[0]} Free space.", stacklevel=2)


def _of_some(group: ProcessGroup | None) -> str:
    return "" if dist.get_world_size(group) == 1 else " of some rank"


class Persistence:
    """Decides when state in memory is written to storage, and writes it.

    With several ranks, rank 0 decides, and the others learn of it in the collective of the next step's norm.

    Args:
        rank_state: The process's open state.
        interval: Optimizer steps (int) or seconds (float) between two writes; None: never.
        group: Process group of all ranks.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        rank_state: RankState,
        *,
        interval: int | float | None,
        group: ProcessGroup | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank_state, self._interval, self._group, self._clock = rank_state, interval, group, clock
        self._num_ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._since, self._step = clock(), 0  # of the last write, in the handler's steps
        self._pause = 0.0  # seconds between two writes, so that writing takes its share of the time at most
        self._follows_save = self._has_warned = self._has_stretched = self._announced = False

    def announce(self) -> bool:
        """Return on rank 0 whether a write is due after the step that begins now; elsewhere False."""
        decides = self._num_ranks > 1 and self._rank == 0 and self._rank_state.is_usable
        return decides and self._rank_state.writes_back and self._is_due(self._rank_state.handler, ahead=1)

    def hear(self, *, announced: bool) -> None:
        """Take over on every rank what rank 0 announced."""
        self._announced = announced

    def _all(self, value: bool) -> bool:
        return sum_over_ranks(not value, self._group) == 0

    def write(self, *, now: bool = False) -> bool:
        """Write the current generation, if it is due and its training record was made. Collective.

        A failure is a warning: the training goes on, and the generation written before stays on storage.

        Args:
            now: Whether it is due in any case.

        Returns:
            Whether the current generation is complete on storage.
        """
        if not self._rank_state.is_usable:
            return False
        handler = self._rank_state.handler
        if handler.is_stored:
            return True
        is_due = self._announced if self._num_ranks > 1 else self._is_due(handler)
        if not (now or self._follows_save or is_due):
            return False
        is_ready = handler.is_recorded or (handler.training is None and self._rank_state.keeping.off is None)
        if not self._all(is_ready and handler.may_persist):
            return False
        begun = self._clock()
        if self._succeeds(handler.persist):
            self._follows_save = self._has_warned = False
        self._announced = False
        self._since, self._step = self._clock(), handler.num_steps
        self._pause = (transfer_settings.INTERVAL_SHARE - 1) * (self._since - begun)
        return handler.is_stored

    def begin_save(self, *, pins: bool) -> bool:
        """Write the current generation before a checkpoint, or with its training record if that follows. Collective.

        So an interrupted training resumes at the checkpoint, or later.

        Args:
            pins: Whether the state that is to be saved must be on storage.

        Returns:
            Whether it is.
        """
        handler = self._rank_state.handler
        if not handler.writes_back or self.write(now=True):
            return True
        self._follows_save = handler.training is not None
        return pins and self._all(handler.may_spill) and self._succeeds(handler.spill)

    def _succeeds(self, write: _Write) -> bool:
        try:
            write(together=partial(failing_together, self._group))
        except SmartInfinityError as error:
            self._warn(error)
            return False
        return True

    def _is_due(self, handler: TransferHandler, *, ahead: int = 0) -> bool:
        passed = self._clock() - self._since
        in_steps = isinstance(self._interval, int)
        if self._interval is None or (handler.num_steps + ahead - self._step if in_steps else passed) < self._interval:
            return False
        if passed < self._pause:
            self._warn_of_pause()
        return passed >= self._pause

    def _warn_of_pause(self) -> None:
        if self._has_stretched:
            return
        self._has_stretched = True
        asked = f"{self._interval} steps" if isinstance(self._interval, int) else f"{_short(self._interval or 0.0)} s"
        _log.warning(
            "State in host memory took %s s to be written to storage, so this is done every %s s instead of every "
            "%s: an interrupted training may lose that much.",
            _short(self._pause / (transfer_settings.INTERVAL_SHARE - 1)),
            _short(self._pause),
            asked,
        )

    def _warn(self, error: SmartInfinityError) -> None:
        if self._has_warned or self._rank:
            return
        self._has_warned = True
        step = self._rank_state.handler.stored_step
        lost = "all of the training" if step is None else f"all steps after step {step}"
        warnings.warn(
            f"State in host memory could not be written to storage: {error} The training goes on. A kill would lose "
            f"{lost}.",
            stacklevel=2,
        )


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.2g}"
