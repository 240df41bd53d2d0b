"""Learns from each forward and its backward what those that follow offload."""

from __future__ import annotations

import logging

from lightning_smartinfinity.activations.forwards import Forward, Plan
from lightning_smartinfinity.activations.rates import Rates
from lightning_smartinfinity.activations.store import ActivationStore
from lightning_smartinfinity.activations.tuning.choice import Choice, Copies, Profile, choose
from lightning_smartinfinity.pipeline.layout.free_memory import measure_memory, share_of_memory
from lightning_smartinfinity.settings import ActivationOffload

__all__ = [
    "FIRST_SETTLED_FORWARD",
    "Lessons",
    "MOST_LOST",
    "Slowdown",
]


_NUM_COMPARED = 3  # forwards: a single one may be slow for any reason
_LEAST_SECONDS = 0.1  # of a forward and its backward: shorter ones vary too much
_TENTH = 10  # one over the share by which shares may differ
_SHARE_OF_MEMORY = 8  # one over the share of free memory that may be taken, since other ranks take some, too


class Slowdown:
    """Compares the time per saved byte of forwards, together with their backwards, on a processor that runs both.

    There, copies, checksums and interrupts of a drive take time from the computation. How much that is depends on the
    machine: the processor time of the transfers is the smallest part, because all threads of an operation wait for the
    one that was interrupted, and because a virtual machine's host may run its drives on the same cores.
    """

    def __init__(self) -> None:
        self._kept: float | None = None  # seconds per byte of the last forward that kept everything
        self._excesses: list[float] = []
        self._has_asked = False
        self._share = 0.0  # of what is saved, that the compared forwards offload

    def ask_to_keep_all(self, last: Forward) -> bool:
        """Return whether the next forward is to keep everything. That is so once, if there is memory for it."""
        if self._has_asked or last.busy_seconds < _LEAST_SECONDS:
            return False
        self._has_asked = True
        report = measure_memory(reserved=0)
        return _SHARE_OF_MEMORY * last.saved_bytes <= share_of_memory([report], report)

    def excess(self, last: Forward) -> float:
        """Return by what share of its time each of three forwards was slower than one that kept everything.

        These are the first three that offload about the share which :meth:`expect` was told last. What later ones take
        depends on more than what they offload, for instance on what else is overlapped with them. It is 0 for these, or
        if one of the three was not slower.
        """
        pace = last.seconds / last.saved_bytes
        if not last.limit:
            self._kept = pace
        elif self._kept is not None and last.busy_seconds >= _LEAST_SECONDS and len(self._excesses) < _NUM_COMPARED:
            self._excesses.append(pace / self._kept - 1)
            if len(self._excesses) == _NUM_COMPARED:
                return max(0.0, min(self._excesses))
        return 0.0

    def expect(self, share: float) -> None:
        """Compare the next forwards, unless they offload about the same share of what they save as those before."""
        if _TENTH * abs(share - self._share) > self._share:
            self._share = share
            self._excesses.clear()


FIRST_SETTLED_FORWARD = 7
"""Number of the first forward that offloads as those that follow, if nothing changes.

The first one warms up, and the second one is measured. On a processor the third one keeps everything, and the three
that follow are compared with it. On a device two with hooks are compared with two without.
"""

MOST_LOST = 20
"""One over the share of its time that a forward and its backward may take longer than without."""

_LESS = 0.75  # most of what was offloaded that is offloaded again after more than that
_AIM = 0.5  # share of the time that may be lost that is aimed at
_PATIENCE, _MOST_PATIENCE = 20, 640  # forwards after which it is chosen again what was lessened
_LEAST_RATE = 1.0  # bytes per second, where nothing was written or read

_log = logging.getLogger(__name__)


class Lessons:
    """Keeps what was learnt of one training.

    Args:
        settings: How much is offloaded.
        store: Where it goes, and what measures storage.

    Attributes:
        plan: Plan of the next forward.
        choice: Choice of what is offloaded; None until it was made, after the second or third forward.
    """

    def __init__(self, settings: ActivationOffload, store: ActivationStore) -> None:
        self._settings, self._store = settings, store
        keep = settings.keep
        # With "auto", micro-batches offload everything until one was measured: how much they save is not known.
        self.plan = Plan(kept_bytes=keep if isinstance(keep, int) else 0)
        self.choice: Choice | None = None
        self._slowdown = Slowdown()
        self._patience = _PATIENCE  # forwards without waits until a try
        self._until_retry = 0  # those that are left; 0 if there is no try to come
        self._most_offloaded = 1.0  # share of what is saved that may leave, whatever size batches have, until a try

    def learn(self, last: Forward) -> None:
        """Learn from a forward, if its backward has come."""
        if not last.order or last.ended is None:
            return
        try:
            last.take_times()
            with self._store.lock:
                rates = self._store.update_rates()  # each time, since storage may be slower or faster than long ago
        except RuntimeError:  # a device has failed, of which whoever uses its tensors is told
            return
        is_first, chosen_for = not self.plan.sizes, 0
        with self._store.lock:
            if is_first:  # it took longer than those that follow: memory and files were new, and caches cold
                offloaded, kept = last.plan.offloaded_bytes, last.plan.kept_bytes
            elif self._compares and not last.plan.is_chosen and self._slowdown.ask_to_keep_all(last):
                offloaded, kept = 0, last.saved_bytes
            elif last.plan.is_chosen and not self._store.is_on_processor and not last.plan.fits(last.saved_bytes):
                # Its times are the host's, which is ahead of the device. The next one is measured there.
                offloaded, kept = last.plan.offloaded_bytes, last.plan.kept_bytes
            else:
                offloaded, kept, chosen_for = self._chosen(last, rates)
            self.plan = Plan(
                sizes=tuple(last.sizes),
                offloaded_bytes=offloaded,
                kept_bytes=kept,
                chosen_for=chosen_for,
                order=tuple(last.order),
                freed_nothing=frozenset(last.freed_nothing),
            )

    @property
    def follows_rates(self) -> bool:
        """Whether what is offloaded is to cost no time."""
        return self._settings.keep == "auto" and self._settings.budget_bytes is None

    @property
    def _compares(self) -> bool:
        return self.follows_rates and self._store.is_on_processor

    def _chosen(self, last: Forward, rates: Rates) -> tuple[int, int, int]:
        """Return how many bytes of the oldest entries are to be offloaded, how many others stay, and for how many."""
        before, keep = last.plan, self._settings.keep
        share = self._share_that_pays(last)
        tries_again = self._tries_again(share < 1)
        if before.is_chosen and before.fits(last.saved_bytes) and share == 1 and not tries_again:
            if self._until_retry == 1 and not before.offloaded_bytes:
                # The next forward is measured. What has room in the pool is not read, so that backward waits for none.
                offloaded = min(self._store.pool_bytes, last.saved_bytes)
                return offloaded, last.saved_bytes - offloaded, before.chosen_for
            return before.offloaded_bytes, before.kept_bytes, before.chosen_for
        if tries_again:
            self._most_offloaded = 1.0
        elif share < 1:
            self._most_offloaded = share * before.offloaded_bytes / last.saved_bytes
        budget = self._settings.budget_bytes
        assert not isinstance(budget, str), "a size given as text is kept as bytes"
        # What was read last may have been read long ago, when storage was slow.
        # Nothing was read at all if the pool has room for everything.
        is_known = rates.read and (rates.is_reading or not tries_again)
        read_rate = rates.read if is_known else rates.write
        choice = choose(
            _profile(last, write_rate=rates.write, read_rate=read_rate, copies=self._copies(rates)),
            keep=keep,
            budget_bytes=budget,
            pool_bytes=self._store.pool_bytes,
            read_ahead_bytes=self._store.read_ahead_bytes,
            most_bytes=round(self._most_offloaded * last.saved_bytes) if self._most_offloaded < 1 else None,
        )
        self.choice = choice
        _tell(choice, last, rates)
        offloaded = sum(last.sizes[: choice.num_offloaded])
        self._slowdown.expect(offloaded / last.saved_bytes)
        if self.follows_rates and not offloaded:
            self._until_retry = self._until_retry or self._patience
        kept = keep if isinstance(keep, int) else last.saved_bytes - offloaded
        return offloaded, kept, last.saved_bytes

    def _copies(self, rates: Rates) -> Copies | None:
        """Return the measurement of copies between a device and the pool, if entries lie on one."""
        if not (rates.copied_out and rates.copied_in):
            return None
        return Copies(out_rate=rates.copied_out, in_rate=rates.copied_in, ahead_bytes=self._store.load_ahead_bytes)

    def _share_that_pays(self, last: Forward) -> float:
        """Return which share of what was offloaded is to leave again: 1.0, if that took no more time than it may."""
        excess = self._slowdown.excess(last) if self._compares else 0.0
        if not self.follows_rates or not last.plan.is_chosen:
            return 1.0
        if MOST_LOST * excess > 1:
            return min(_LESS, _AIM / (MOST_LOST * excess))
        waits = MOST_LOST * last.waited_seconds > last.busy_seconds
        return _LESS if waits else 1.0

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


def _profile(last: Forward, *, write_rate: float, read_rate: float, copies: Copies | None) -> Profile:
    """Return the measurement of a forward and its backward, with rates of storage in bytes per second."""
    return Profile(
        # Where backward runs within forward, as in manual optimization, more may be packed after it has begun.
        times=tuple(min(each, last.forward_seconds) for each in last.times),
        # Whether those that somebody else holds are written or not, they take no memory here.
        sizes=tuple(0 if number in last.freed_nothing else size for number, size in enumerate(last.sizes)),
        forward_seconds=last.forward_seconds,
        backward_seconds=last.backward_seconds,
        write_rate=max(write_rate, _LEAST_RATE),
        read_rate=max(read_rate, _LEAST_RATE),
        copies=copies,
    )


def _tell(choice: Choice, last: Forward, rates: Rates) -> None:
    """Log what was chosen."""
    _log.info(
        "Of %.1f MB that forward saves, %.1f MB are offloaded and %.1f MB are kept. For that %.1f MB/s have to leave; "
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
