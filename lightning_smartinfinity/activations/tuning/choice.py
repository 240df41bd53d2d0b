"""Chooses how much of what a forward saves is offloaded, by arithmetic on one measured micro-batch.

The entries of a forward are numbered in the order in which they were packed, and backward uses them in reverse. The
oldest entries are offloaded and the newest are kept. The model of a storage device is simple:

- Writes run one at a time, each as soon as its entry was packed. Writes that have not ended when backward begins are
  cancelled, and backward uses the entries in memory.
- Reads begin with backward and run one at a time. At most ``read_ahead_bytes`` are read and not yet used.
- Backward wants an entry as long after its begin as the entry was packed before the end of forward, multiplied by the
  ratio of backward's time to forward's time.

An entry on a device is evicted when it is copied into the pool of host memory. Storage gets the oldest entries, for
which the pool has no room:

- Copies out run one at a time, each as soon as its entry was packed and the pool has room, because enough of the older
  entries are written. Entries that are not copied when backward begins stay on the device.
- Copies in are like reads, bounded by ``Copies.ahead_bytes``. Reads of entries that are not in the pool are modelled
  independently of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

__all__ = ["Choice", "Copies", "Profile", "choose", "peak_of", "stall_of"]


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Measurement of the copies between a device and the pool.

    Args:
        out_rate: Bytes per second from the device, above zero.
        in_rate: Bytes per second to the device, above zero.
        ahead_bytes: Most bytes that are copied to the device before backward wants them.
    """

    out_rate: float
    in_rate: float
    ahead_bytes: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurement of one micro-batch.

    Args:
        times: When each entry was packed, in seconds since forward began, in ascending order.
        sizes: Bytes of each entry.
        forward_seconds: Time of forward, above zero.
        backward_seconds: Time of backward, without waits for storage.
        write_rate: Bytes per second that storage writes, above zero.
        read_rate: Bytes per second that storage reads, above zero.
        copies: Copies from and to the device that holds the entries; None if host memory holds them.
    """

    times: tuple[float, ...]
    sizes: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    write_rate: float
    read_rate: float
    copies: Copies | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Part that is offloaded, and its predicted cost.

    Args:
        num_offloaded: Number of the oldest entries that are offloaded.
        offloaded_bytes: Bytes of these entries.
        kept_bytes: Bytes of the other entries.
        seconds: Predicted time of forward and backward, with waits.
        stall_seconds: Predicted time for which backward waits for storage, or for copies to its device.
        peak_bytes: Most bytes that are predicted to be held for backward at once: on the device if there is one and no
            budget, which the pool counts towards.
    """

    num_offloaded: int
    offloaded_bytes: int
    kept_bytes: int
    seconds: float
    stall_seconds: float
    peak_bytes: int


def choose(
    profile: Profile,
    *,
    keep: int | str,
    budget_bytes: int | None,
    pool_bytes: int,
    read_ahead_bytes: int,
    most_bytes: int | None = None,
) -> Choice:
    """Choose how many of the oldest entries are offloaded.

    Args:
        profile: Measurement of a micro-batch.
        keep: Most bytes of the newest entries to keep. ``"auto"`` with a budget: the largest newest part that fits into
            the budget. ``"auto"`` without: the smallest newest part with which backward never waits.
        budget_bytes: Most bytes to hold for backward; None: no limit.
        pool_bytes: Size of the pool. Written entries stay there until other entries or the budget need the room.
        read_ahead_bytes: Most bytes that are read before backward wants them.
        most_bytes: Most bytes to offload; None: no limit.
    """
    sums = list(accumulate(profile.sizes, initial=0))
    # With a budget, entries in the pool count towards it until they are written, as without a device.
    held = profile if budget_bytes is None else replace(profile, copies=None)
    if isinstance(keep, int):
        num = bisect_left(sums, sums[-1] - keep)
    elif budget_bytes is not None:
        num = bisect_left(
            range(len(profile.sizes)),
            True,
            key=lambda num: peak_of(held, num, pool_bytes=0, read_ahead_bytes=read_ahead_bytes) <= budget_bytes,
        )
    else:
        # One more entry delays every read of the others, so that backward also waits with all larger numbers.
        num = bisect_left(
            range(_num_evicted(profile, pool_bytes=pool_bytes)),
            True,
            key=lambda num: stall_of(profile, num + 1, pool_bytes=pool_bytes, read_ahead_bytes=read_ahead_bytes) > 0,
        )
    if most_bytes is not None:
        num = min(num, bisect_right(sums, most_bytes) - 1)
    peak = peak_of(held, num, pool_bytes=pool_bytes, read_ahead_bytes=read_ahead_bytes)
    if held.copies is None:
        with_pool = sums[-1] - sums[num] + min(pool_bytes, sums[num])
        peak = max(peak, with_pool if budget_bytes is None else min(with_pool, budget_bytes))
    stall = stall_of(profile, num, pool_bytes=pool_bytes, read_ahead_bytes=read_ahead_bytes)
    return Choice(
        num_offloaded=num,
        offloaded_bytes=sums[num],
        kept_bytes=sums[-1] - sums[num],
        seconds=profile.forward_seconds + profile.backward_seconds + stall,
        stall_seconds=stall,
        peak_bytes=peak,
    )


def stall_of(profile: Profile, num: int, *, pool_bytes: int, read_ahead_bytes: int) -> float:
    """Return for how many seconds backward waits for entries if the oldest ``num`` are offloaded."""
    num, copies = min(num, _num_evicted(profile, pool_bytes=pool_bytes)), profile.copies
    if copies is None:
        return _lateness(profile, num, rate=profile.read_rate, ahead_bytes=read_ahead_bytes)
    # The newest evicted entries are still in the pool.
    sums = list(accumulate(profile.sizes[:num], initial=0))
    only_on_storage = bisect_left(sums, sums[num] - pool_bytes)
    return max(
        _lateness(profile, num, rate=copies.in_rate, ahead_bytes=copies.ahead_bytes),
        _lateness(profile, only_on_storage, rate=profile.read_rate, ahead_bytes=read_ahead_bytes),
    )


def _lateness(profile: Profile, num: int, *, rate: float, ahead_bytes: int) -> float:
    """Return how late backward ends if it waits for the oldest ``num`` entries, read at ``rate`` bytes per second."""
    sizes, forward, backward = profile.sizes, profile.forward_seconds, profile.backward_seconds
    used: dict[int, float] = {}
    ready, late = forward, 0.0
    first_unused = num - 1  # the newest entry whose bytes count as read ahead
    ahead = 0
    for index in reversed(range(num)):
        start = ready
        while ahead and ahead + sizes[index] > ahead_bytes:
            ahead -= sizes[first_unused]
            start = max(start, used[first_unused])
            first_unused -= 1
        ahead += sizes[index]
        ready = start + sizes[index] / rate
        wanted = forward + (forward - profile.times[index]) * backward / forward  # if backward never waits before
        late = max(late, ready - wanted)
        used[index] = wanted + late
    return late


def peak_of(profile: Profile, num: int, *, pool_bytes: int, read_ahead_bytes: int) -> int:
    """Return the most bytes that are held for backward at once if the oldest ``num`` entries are offloaded.

    With a device, this is on the device. Without, written entries that the pool keeps do not count.
    """
    held = peak = 0
    ends, evicted = _eviction_ends(profile, pool_bytes=pool_bytes), 0
    for index, time in enumerate(profile.times):
        while evicted < min(num, index) and ends[evicted] <= time:
            held -= profile.sizes[evicted]
            evicted += 1
        held += profile.sizes[index]
        peak = max(peak, held)
    ahead_bytes = read_ahead_bytes if profile.copies is None else profile.copies.ahead_bytes
    gone = sum(profile.sizes[: min(num, bisect_right(ends, profile.forward_seconds))])
    return max(peak, sum(profile.sizes) - gone + min(ahead_bytes, gone))


def _num_evicted(profile: Profile, *, pool_bytes: int) -> int:
    """Return how many entries can be evicted before backward begins."""
    return bisect_right(_eviction_ends(profile, pool_bytes=pool_bytes), profile.forward_seconds)


def _eviction_ends(profile: Profile, *, pool_bytes: int) -> list[float]:
    """Return when each entry is written if all are, or copied into the pool if a device holds it."""
    copied = written = 0.0
    copied_ends: list[float] = []
    written_ends: list[float] = []
    sums = list(accumulate(profile.sizes, initial=0))
    for index, (ready, size) in enumerate(zip(profile.times, profile.sizes, strict=True)):
        if profile.copies is not None:
            # The pool has room when this number of older entries is written.
            num = bisect_left(sums, sums[index + 1] - pool_bytes)
            room = (written_ends[num - 1] if num else 0.0) if num <= index else inf
            ready = copied = max(copied, ready, room) + size / profile.copies.out_rate
            copied_ends.append(copied)
        written = max(written, ready) + size / profile.write_rate
        written_ends.append(written)
    return written_ends if profile.copies is None else copied_ends
