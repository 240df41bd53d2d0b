"""Tunes how much forwards offload, from the measured times of earlier forwards and their backwards."""

from __future__ import annotations

import logging
from dataclasses import replace

from lightning_smartinfinity.activations.forwards import Forward, Plan
from lightning_smartinfinity.activations.rates import Rates
from lightning_smartinfinity.activations.store import ActivationStore
from lightning_smartinfinity.activations.tuning.choice import Choice, Copies, Profile, choose
from lightning_smartinfinity.activations.tuning.times import MOST_LOST, Times
from lightning_smartinfinity.pipeline.layout.free_memory import measure_memory
from lightning_smartinfinity.settings import ActivationOffload

__all__ = ["FIRST_SETTLED_FORWARD", "Tuner"]

FIRST_SETTLED_FORWARD = 7
"""Number of the first forward that offloads as much as those that follow, if nothing changes.

The first one warms up, and the second one is measured. On a processor the third one keeps everything, and the three
that follow are compared with it. On a device two with hooks are compared with two without.
"""

_NUM_COMPARED = 3  # forwards that offload
_LEAST_SECONDS = 0.1  # of a forward and its backward that are compared: shorter ones vary too much
_TENTH = 10  # one over the share by which shares may differ
_SHARE_OF_MEMORY = 8  # one over the share of free memory that may be used, because other ranks use some, too
_LESS = 0.75  # most of what was offloaded that is offloaded again after offloading took too long
_AIM = 0.5  # share of the time that may be lost to aim at
_PATIENCE, _MOST_PATIENCE = 20, 640  # forwards until a retry
_LEAST_RATE = 1.0  # bytes per second, where nothing was written or read

_log = logging.getLogger(__name__)


class Tuner:
    """Plans the next forward of one training.

    On a processor, copies, checksums and interrupts of a drive take time from the computation. How much depends on the
    machine: the processor time of the transfers is the smallest part, because all threads of an operation wait for the
    interrupted one, and because the host of a virtual machine may run its drives on the same cores. So the times per
    saved byte of the first three forwards that offload are compared with that of one that keeps everything. Later ones
    are not: their times also depend on other work, for instance on overlapped updates.

    Args:
        settings: How much is offloaded.
        store: Store of the entries, which measures storage.

    Attributes:
        plan: Plan of the next forward.
        choice: Choice of what is offloaded; None until it was made, after the second or third forward.
    """

    def __init__(self, settings: ActivationOffload, store: ActivationStore) -> None:
        self._settings, self._store = settings, store
        keep = settings.keep
        # With "auto", micro-batches offload everything until one was measured: how much they save is unknown.
        self.plan = Plan(kept_bytes=keep if isinstance(keep, int) else 0)
        self.choice: Choice | None = None
        self._paces = Times()  # in seconds per saved byte
        self._has_kept_all = False  # or there was no memory to keep everything
        self._share = 0.0  # of what is saved, that the compared forwards offload
        self._patience = _PATIENCE  # forwards without waits until the next retry
        self._until_retry = 0  # remaining ones of these; 0 if no retry is planned
        self._most_offloaded = 1.0  # most of what is saved, as a share, that is offloaded until a retry

    @property
    def has_budget(self) -> bool:
        """Whether the settings limit what is held for backward."""
        return self._settings.budget_bytes is not None

    @property
    def follows_rates(self) -> bool:
        """Whether offloading must cost no time."""
        return self._settings.keep == "auto" and not self.has_budget

    def learn(self, last: Forward) -> None:
        """Plan the next forward from the last one, if its backward has run."""
        if not last.order or last.ended is None:
            return
        try:
            last.take_times()
            with self._store.lock:
                rates = self._store.update_rates()  # each time, because storage may become slower or faster
        except RuntimeError:  # a device has failed, which raises where its tensors are used
            return
        with self._store.lock:
            self.plan = replace(
                self._next_plan(last, rates),
                sizes=tuple(last.sizes),
                order=tuple(last.order),
                freed_nothing=frozenset(last.freed_nothing),
            )

    def _next_plan(self, last: Forward, rates: Rates) -> Plan:
        before, is_on_processor = last.plan, self._store.is_on_processor
        is_first = not self.plan.sizes  # it took longer than others: memory and files were new, and caches cold
        # Without a clock, the times are the host's, which runs ahead of the device. The next forward has a clock.
        is_unmeasured = before.is_chosen and not is_on_processor and not before.fits(last.saved_bytes)
        if is_first or is_unmeasured:
            return replace(before, chosen_for=0)
        is_compared = self.follows_rates and is_on_processor and last.busy_seconds >= _LEAST_SECONDS
        if is_compared and not before.is_chosen and not self._has_kept_all:
            self._has_kept_all = True
            # Optimizer state in memory has left room for activations, so that all free memory counts.
            if _SHARE_OF_MEMORY * last.saved_bytes <= measure_memory(reserved=0).available:
                return Plan(kept_bytes=last.saved_bytes)
        share = self._share_that_pays(last)
        is_retry = self._is_retry(share < 1)
        if not before.is_chosen or not before.fits(last.saved_bytes) or share < 1 or is_retry:
            if is_retry:
                self._most_offloaded = 1.0
            elif share < 1:
                self._most_offloaded = share * before.offloaded_bytes / last.saved_bytes
            return self._choose(last, rates, is_retry=is_retry)
        if self._until_retry == 1 and not before.offloaded_bytes:
            # The next forward measures storage. It offloads what the pool has room for, so that backward reads nothing.
            offloaded = min(self._store.pool.limit, last.saved_bytes)
            return replace(before, offloaded_bytes=offloaded, kept_bytes=last.saved_bytes - offloaded)
        return before

    def _choose(self, last: Forward, rates: Rates, *, is_retry: bool) -> Plan:
        keep, budget = self._settings.keep, self._settings.budget_bytes
        assert not isinstance(budget, str), "a size given as text is kept as bytes"
        self.choice = choose(
            _profile(last, rates, is_retry=is_retry, load_ahead_bytes=self._store.loads.limit),
            keep=keep,
            budget_bytes=budget,
            pool_bytes=self._store.pool.limit,
            read_ahead_bytes=self._store.reads.ahead_bytes,
            most_bytes=round(self._most_offloaded * last.saved_bytes),
        )
        _log_choice(self.choice, last, rates)
        offloaded = sum(last.sizes[: self.choice.num_offloaded])
        share = offloaded / last.saved_bytes
        if _TENTH * abs(share - self._share) > self._share:
            self._share, self._paces.offloading = share, []
        if self.follows_rates and not offloaded:
            self._until_retry = self._until_retry or self._patience
        kept = keep if isinstance(keep, int) else last.saved_bytes - offloaded
        return Plan(offloaded_bytes=offloaded, kept_bytes=kept, chosen_for=last.saved_bytes)

    def _share_that_pays(self, last: Forward) -> float:
        """Return which share of what was offloaded to offload again: 1.0 if it took no more time than it may."""
        if not self.follows_rates:
            return 1.0
        excess = self._excess(last) if self._store.is_on_processor else 0.0
        if not last.plan.is_chosen:
            return 1.0
        if MOST_LOST * excess > 1:
            return min(_LESS, _AIM / (MOST_LOST * excess))
        return _LESS if MOST_LOST * last.waited_seconds > last.busy_seconds else 1.0

    def _excess(self, last: Forward) -> float:
        """Return the excess of the forwards that are compared, after the last one of these; 0.0 after all others."""
        pace, paces = last.seconds / last.saved_bytes, self._paces
        if not last.limit:
            paces.plain = [pace]
        elif paces.plain and last.busy_seconds >= _LEAST_SECONDS and len(paces.offloading) < _NUM_COMPARED:
            paces.offloading.append(pace)
            if len(paces.offloading) == _NUM_COMPARED:
                return paces.excess
        return 0.0

    def _is_retry(self, waits: bool) -> bool:
        """Return whether to choose anew although nothing waits, some time after less was offloaded, or nothing.

        The wait may have been the only one. If it was not, the next retry comes after twice as many forwards.
        """
        if waits:
            self._until_retry = self._patience
        elif self._until_retry == 1:
            self._until_retry = self._patience = min(2 * self._patience, _MOST_PATIENCE)
            return True
        else:
            self._until_retry = max(0, self._until_retry - 1)
        return False


def _profile(last: Forward, rates: Rates, *, is_retry: bool, load_ahead_bytes: int) -> Profile:
    """Return the measurement of a forward and its backward."""
    # Reads may have been measured long ago, when storage was slow, or never if the pool has room for everything.
    read_rate = rates.read if rates.read and (rates.is_reading or not is_retry) else rates.write
    copies = Copies(out_rate=rates.copied_out, in_rate=rates.copied_in, ahead_bytes=load_ahead_bytes)
    return Profile(
        # Where backward runs within forward, as in manual optimization, more may be packed after it has begun.
        times=tuple(min(each, last.forward_seconds) for each in last.times),
        # Entries that something else holds free no memory, whether or not they are written.
        sizes=tuple(0 if number in last.freed_nothing else size for number, size in enumerate(last.sizes)),
        forward_seconds=last.forward_seconds,
        backward_seconds=last.backward_seconds,
        write_rate=max(rates.write, _LEAST_RATE),
        read_rate=max(read_rate, _LEAST_RATE),
        copies=copies if copies.out_rate and copies.in_rate else None,
    )


def _log_choice(choice: Choice, last: Forward, rates: Rates) -> None:
    _log.info(
        "Of %.1f MB that forward saves, %.1f MB are offloaded and %.1f MB are kept. That needs %.1f MB/s; "
        "storage was seen to write %.1f MB/s and to read %.1f MB/s%s. Predicted: %.3f s of waits in backward, at most "
        "%.1f MB held.",
        (choice.offloaded_bytes + choice.kept_bytes) / 1e6,
        choice.offloaded_bytes / 1e6,
        choice.kept_bytes / 1e6,
        choice.offloaded_bytes / last.forward_seconds / 1e6,
        rates.write / 1e6,
        rates.read / 1e6,
        f", copies from the device {rates.copied_out / 1e6:.1f} MB/s" if rates.copied_out else "",
        choice.stall_seconds,
        choice.peak_bytes / 1e6,
    )
