"""Learns from each forward and its backward what those that follow offload."""

from __future__ import annotations

import logging

from lightning_smartinfinity.activations.choice import Choice, Profile, choose
from lightning_smartinfinity.activations.forwards import Forward, Plan
from lightning_smartinfinity.activations.rates import Rates
from lightning_smartinfinity.activations.store import ActivationStore
from lightning_smartinfinity.config import ActivationOffload

__all__ = ["FIRST_CHOSEN_FORWARD", "Lessons"]

FIRST_CHOSEN_FORWARD = 3
"""Number of the first forward whose offloading is chosen: the first one warms up, and the second one is measured."""

_MOST_WAITS = 20  # one over the share of a forward and its backward that waits for storage may take
_LESS = 4  # one over the share by which less is offloaded after more waits
_PATIENCE, _MOST_PATIENCE = 20, 640  # forwards after which it is chosen again what was lessened
_LEAST_SECONDS = 1e-9
_LEAST_RATE = 1.0  # bytes per second, where nothing was written or read

_log = logging.getLogger(__name__)


class Lessons:
    """Keeps what was learnt of one training.

    Args:
        settings: How much is offloaded.
        store: Where it goes, and what measures storage.

    Attributes:
        plan: Plan of the next forward.
        choice: Choice of what is offloaded; None until it was made for forward number FIRST_CHOSEN_FORWARD.
    """

    def __init__(self, settings: ActivationOffload, store: ActivationStore) -> None:
        self._settings, self._store = settings, store
        keep = settings.keep
        # With "auto", micro-batches offload everything until one was measured: how much they save is not known.
        self.plan = Plan(kept_bytes=keep if isinstance(keep, int) else 0)
        self.choice: Choice | None = None
        self._patience = _PATIENCE  # forwards without waits until a try
        self._until_retry = 0  # those that are left; 0 if there is no try to come

    def learn(self, last: Forward) -> None:
        """Learn from a forward, if its backward has come."""
        if not last.order or last.ended is None:
            return
        is_first = not self.plan.sizes
        with self._store.lock:
            if is_first:  # it took longer than those that follow: memory and files were new, and caches cold
                self._store.update_rates()
                offloaded, kept = last.plan.offloaded_bytes, last.plan.kept_bytes
            else:
                offloaded, kept = self._chosen(last)
            self.plan = Plan(
                sizes=tuple(last.sizes),
                offloaded_bytes=offloaded,
                kept_bytes=kept,
                is_chosen=not is_first,
                order=tuple(last.order),
                freed_nothing=frozenset(last.freed_nothing),
            )

    def _chosen(self, last: Forward) -> tuple[int, int]:
        """Return how many bytes of the oldest entries are to be offloaded, and how many others are to stay."""
        before, keep, budget = last.plan, self._settings.keep, self._settings.budget_bytes
        follows_rates = keep == "auto" and budget is None
        rates = self._store.update_rates()  # each time, since storage may be slower or faster than long ago
        waits = follows_rates and before.is_chosen and _waits(last)
        tries_again = self._tries_again(waits)
        if before.is_chosen and before.fits(last.saved_bytes) and not waits and not tries_again:
            if self._until_retry == 1 and not before.offloaded_bytes:
                # The next forward is measured. What has room in the pool is not read, so that backward waits for none.
                offloaded = min(self._store.pool_bytes, last.saved_bytes)
                return offloaded, last.saved_bytes - offloaded
            return before.offloaded_bytes, before.kept_bytes
        # What was read last may have been read long ago, when storage was slow.
        read_rate = rates.write if tries_again and not rates.is_reading else rates.read
        assert not isinstance(budget, str), "a size given as text is kept as bytes"
        choice = choose(
            _profile(last, write_rate=rates.write, read_rate=read_rate),
            keep=keep,
            budget_bytes=budget,
            pool_bytes=self._store.pool_bytes,
            read_ahead_bytes=self._store.read_ahead_bytes,
        )
        self.choice = choice
        _tell(choice, last, rates)
        offloaded = sum(last.sizes[: choice.num_offloaded])
        if waits:
            offloaded = min(offloaded, before.offloaded_bytes - before.offloaded_bytes // _LESS)
        if follows_rates and not offloaded:
            self._until_retry = self._until_retry or self._patience
        kept = keep if isinstance(keep, int) else last.saved_bytes - offloaded
        return offloaded, kept

    def _tries_again(self, waits: bool) -> bool:
        """Return whether to choose anew although nothing waits, some time after less was offloaded, or nothing.

        The wait may have been the only one. If it was not, the next try takes twice as long to come.
        """
        if waits:
            self._until_retry = self._patience
            return False
        if self._until_retry != 1:
            self._until_retry -= self._until_retry > 0
            return False
        self._until_retry = self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return True


def _forward_seconds(last: Forward) -> float:
    assert last.ended is not None
    return max(last.ended - last.began - last.held_up_seconds, _LEAST_SECONDS)


def _backward_seconds(last: Forward) -> float:
    return max(last.last_use - last.first_use - last.waited_seconds, 0.0)


def _waits(last: Forward) -> bool:
    """Return whether backward has waited for a share of a forward and its backward that is too large."""
    return _MOST_WAITS * last.waited_seconds > _forward_seconds(last) + _backward_seconds(last)


def _profile(last: Forward, *, write_rate: float, read_rate: float) -> Profile:
    """Return the measurement of a forward and its backward, with rates of storage in bytes per second."""
    forward_seconds = _forward_seconds(last)
    return Profile(
        # Where backward runs within forward, as in manual optimization, more may be packed after it has begun.
        times=tuple(min(each, forward_seconds) for each in last.times),
        # Whether those that somebody else holds are written or not, they take no memory here.
        sizes=tuple(0 if number in last.freed_nothing else size for number, size in enumerate(last.sizes)),
        forward_seconds=forward_seconds,
        backward_seconds=_backward_seconds(last),
        write_rate=max(write_rate, _LEAST_RATE),
        read_rate=max(read_rate, _LEAST_RATE),
    )


def _tell(choice: Choice, last: Forward, rates: Rates) -> None:
    """Log what was chosen."""
    _log.info(
        "Of %.1f MB that forward saves, %.1f MB are offloaded and %.1f MB are kept. That needs %.1f MB/s of "
        "writes; storage was seen to write %.1f MB/s and to read %.1f MB/s. Predicted: %.3f s of waits in "
        "backward, at most %.1f MB held.",
        (choice.offloaded_bytes + choice.kept_bytes) / 1e6,
        choice.offloaded_bytes / 1e6,
        choice.kept_bytes / 1e6,
        choice.offloaded_bytes / _forward_seconds(last) / 1e6,
        rates.write / 1e6,
        rates.read / 1e6,
        choice.stall_seconds,
        choice.peak_bytes / 1e6,
    )
