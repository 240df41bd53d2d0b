"""Writes state in host memory to storage at an interval (``TransferConfig(durability="interval")``).

Between two writes, generations exist in memory only, except for the one written last: it stays whole on storage, with
its training record, and an interrupted training resumes from it. All ranks write after the same step.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.errors import RankLostError, SmartInfinityError, StorageError, StorageFullError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.settings import transfer as transfer_settings
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.ranks.collectives import (
    all_come,
    failing_together,
    gather,
    raising_together,
    sum_over_ranks,
    writing_group,
)

__all__ = ["Persistence", "begin_write_back"]

_log = logging.getLogger(__name__)

_GRACE = 5.0  # seconds that a rank may get Ctrl-C later than another one


def begin_write_back(handler: TransferHandler, transfer: TransferConfig, group: ProcessGroup | None) -> None:
    """Write resident state back from now on, if the settings ask for it and storage has room. Collective.

    All ranks do so if one of them has resident state: they complete generations on storage together.

    Args:
        handler: The open handler, whose state is complete on storage.
        transfer: The transfer settings.
        group: Process group of all ranks.

    Raises:
        StorageError: A state file cannot be extended, for a reason other than a full disk; raised on every rank.
    """
    if transfer.interval is None:
        return
    if not any(gather(handler.num_resident, group)):
        _warn_of_steps("no state is in host memory (dram_cache_bytes)", group)
        return
    problem = ""
    with raising_together(group):
        try:
            handler.write_back()
        except StorageFullError as error:
            problem = error.problem
    problems = [each for each in gather(problem, group) if each]
    if not problems:
        return
    if handler.writes_back:
        handler.write_through()
    _warn_of_steps(f"storage has no room for a third place of state. {problems[0]} Free space there", group)


def _warn_of_steps(reason: str, group: ProcessGroup | None) -> None:
    if dist.get_rank(group) == 0:
        warnings.warn(
            f"durability='interval' works as 'step', which writes all optimizer state in every step: {reason}.",
            stacklevel=3,
        )


class Persistence:
    """Decides when a rank's state in memory is written to storage, and writes it.

    Args:
        rank_state: The rank's open state.
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
        self._rank_state, self._group, self._clock = rank_state, group, clock
        self._interval = interval
        self._num_steps = 0
        self._since = clock()
        self._pause = 0.0  # seconds between two writes, so that writing takes its share of the time at most
        self._is_due = False
        self._has_warned = self._has_stretched = False
        several = rank_state.writes_back and dist.get_world_size(group) > 1
        self._writing_group = writing_group(rank_state.keeping.flush_timeout + _GRACE) if several else None

    def vote(self) -> float:
        """Return this rank's summand for :meth:`agree`, once in each step."""
        self._num_steps += 1
        if not self._rank_state.handler.writes_back:
            return 0.0
        if self._rank_state.handler.is_pinned:  # a save reads the generation on storage
            return -float(dist.get_world_size(self._group))
        return float(dist.get_rank(self._group) == 0 and self._time_has_come())

    def agree(self, votes: float) -> None:
        """Decide from the sum over all ranks whether the next generation is written."""
        self._is_due = self._is_due or votes > 0

    def _time_has_come(self) -> bool:
        passed = self._clock() - self._since
        if self._interval is None or (self._num_steps if isinstance(self._interval, int) else passed) < self._interval:
            return False
        if passed < self._pause:
            self._warn_of_pause()
        return passed >= self._pause

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
            self._renew(handler)
            return True
        if not (now or self._is_due) or not handler.may_persist:
            return False
        is_ready = handler.is_recorded or (handler.training is None and self._rank_state.keeping.off is None)
        if sum_over_ranks(float(not is_ready), self._group) > 0:
            return False
        begun = self._clock()
        try:
            handler.persist(together=partial(failing_together, self._group))
        except RankLostError:
            raise
        except SmartInfinityError as error:
            self._warn(error)
        else:
            self._has_warned = False
        self._is_due, self._num_steps, self._since = False, 0, self._clock()
        self._pause = (transfer_settings.INTERVAL_SHARE - 1) * (self._since - begun)
        return handler.is_stored

    def end_alone(self) -> None:
        """Write state in memory after an error has ended the training. Not collective, except after Ctrl-C.

        After Ctrl-C the launcher kills all other ranks as soon as rank 0 has ended: it awaits them.
        """
        self._rank_state.write()
        if self._writing_group is not None and isinstance(sys.exc_info()[1], KeyboardInterrupt):
            all_come(0, self._writing_group)

    def _renew(self, handler: TransferHandler) -> None:
        """Replace a provisional record on storage if the record of the step was made since. Collective."""
        if not handler.stores_provisional or sum_over_ranks(float(not handler.is_fully_recorded), self._group) > 0:
            return
        with suppress(StorageError):  # the provisional record stays
            handler.renew_record(together=partial(failing_together, self._group))

    def _warn_of_pause(self) -> None:
        if self._has_stretched:
            return
        self._has_stretched = True
        asked = f"{self._interval} steps" if isinstance(self._interval, int) else f"{self._interval:.0f} s"
        _log.warning(
            "State in host memory took %.1f s to be written to storage, so this is done every %.0f s instead of every "
            "%s: an interrupted training may lose that much.",
            self._pause / (transfer_settings.INTERVAL_SHARE - 1),
            self._pause,
            asked,
        )

    def _warn(self, error: SmartInfinityError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        step = self._rank_state.handler.stored_step
        lost = "all of the training" if step is None else f"all steps after step {step}"
        warnings.warn(
            f"State in host memory could not be written to storage: {error} The training goes on. A kill would lose "
            f"{lost}.",
            stacklevel=2,
        )
