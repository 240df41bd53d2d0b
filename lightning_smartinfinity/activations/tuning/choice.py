"""Chooses how much of what a forward saves is offloaded. This is pure arithmetic on one measured micro-batch.

The entries of a forward are numbered in the order in which they were packed, and backward wants them in reverse. The
oldest ones are offloaded and the newest ones are kept. The model of a storage device is simple:

- Writes take place one after the other, each as soon as its entry was packed. Those that have not ended when backward
  begins are cancelled: their entries are still in memory and are forwarded.
- Reads begin with backward and take place one after the other. At most ``read_ahead_bytes`` are read and not yet used.
- Backward wants an entry as long after its begin as the entry was packed before the end of forward, stretched by how
  much longer backward takes than forward.

From a device an entry leaves when it is copied into the pool of host memory, and storage gets what the pool has no room
for, the oldest first:

- Copies out take place one after the other, each as soon as its entry was packed and the pool has room, because enough
  of the older entries are written. What has not left when backward begins stays on the device.
- Copies in are as reads, bounded by ``Copies.ahead_bytes``. So are, on their own, the reads of what is not in the pool.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

__all__ = ["Choice", "Copies", "Profile", "choose", "fitting", "peak_of", "stall_of", "without_stall"]


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Measurement of the copies between a device and the pool.

    Args:
        out_rate: Bytes per second from the device, above zero.
        in_rate: Bytes per second to the device, above zero.
        ahead_bytes: Most bytes that are copied to the device before they are wanted.
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
        copies: Copies from and to the device on which the entries lie; None if they lie in host memory.
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
        offloaded_bytes: Their bytes.
        kept_bytes: Bytes of the other entries.
        seconds: Predicted time of forward and backward, with that.
        stall_seconds: Time for which backward is predicted to wait for storage, or for copies to its device.
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
        profile: What was measured.
        keep: Most bytes of the newest entries to keep, or ``"auto"``: with a budget the largest newest part that fits
            into it, otherwise the smallest newest part with which backward never waits.
        budget_bytes: Most bytes to hold for backward; None: there is no limit.
        pool_bytes: Size of the pool. What was written stays there until others need the room, or the budget does.
        read_ahead_bytes: Most bytes that are read before they are wanted.
        most_bytes: Most bytes to offload; None: there is no limit.
    """
    sums = list(accumulate(profile.sizes, initial=0))
    if isinstance(keep, int):
        num = bisect_left(sums, sums[-1] - keep)
    elif budget_bytes is not None:
        num = fitting(profile, budget_bytes=budget_bytes, read_ahead_bytes=read_ahead_bytes)
    else:
        num = without_stall(profile, pool_bytes=pool_bytes, read_ahead_bytes=read_ahead_bytes)
    if most_bytes is not None:
        num = min(num, bisect_right(sums, most_bytes) - 1)
    # From a device, what the pool holds counts towards the budget until it is written.
    held = profile if budget_bytes is None else replace(profile, copies=None)
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


def without_stall(profile: Profile, *, pool_bytes: int, read_ahead_bytes: int) -> int:
    """Return how many of the oldest entries can be offloaded so that backward waits for none of them.

    What cannot leave before backward begins is not offloaded.
    """
    # One more entry delays every read of the others, so that backward also waits with all larger numbers.
    return _first(
        _left_by_end(profile, pool_bytes=pool_bytes),
        lambda num: stall_of(profile, num + 1, pool_bytes=pool_bytes, read_ahead_bytes=read_ahead_bytes) > 0,
    )


def fitting(profile: Profile, *, budget_bytes: int, read_ahead_bytes: int) -> int:
    """Return the least number of the oldest entries that must be offloaded so that the rest fits into a budget.

    If nothing fits, it is the number of all entries.
    """
    held = replace(profile, copies=None)
    return _first(
        len(profile.sizes),
        lambda num: peak_of(held, num, pool_bytes=0, read_ahead_bytes=read_ahead_bytes) <= budget_bytes,
    )


def stall_of(profile: Profile, num: int, *, pool_bytes: int, read_ahead_bytes: int) -> float:
    """Return for how many seconds backward waits for entries if the oldest ``num`` are offloaded."""
    num, copies = min(num, _left_by_end(profile, pool_bytes=pool_bytes)), profile.copies
    if copies is None:
        return _lateness(profile, num, rate=profile.read_rate, ahead_bytes=read_ahead_bytes)
    # The newest entries that left are still in the pool.
    sums = list(accumulate(profile.sizes[:num], initial=0))
    only_on_storage = bisect_left(sums, sums[num] - pool_bytes)
    return max(
        _lateness(profile, num, rate=copies.in_rate, ahead_bytes=copies.ahead_bytes),
        _lateness(profile, only_on_storage, rate=profile.read_rate, ahead_bytes=read_ahead_bytes),
    )


def _lateness(profile: Profile, num: int, *, rate: float, ahead_bytes: int) -> float:
    """Return how late backward ends if it waits for the oldest ``num`` entries, which are read at a rate."""
    sizes, begin = profile.sizes, profile.forward_seconds
    used: dict[int, float] = {}
    ready, late = begin, 0.0
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
        wanted = _wanted(profile, index)
        late = max(late, ready - wanted)
        used[index] = wanted + late
    return late


def peak_of(profile: Profile, num: int, *, pool_bytes: int, read_ahead_bytes: int) -> int:
    """Return the most bytes that are held for backward at once if the oldest ``num`` entries are offloaded.

    From a device, that is on the device. Otherwise what the pool keeps of what is written does not count.
    """
    held = peak = 0
    ends, left = _leave_ends(profile, pool_bytes=pool_bytes), 0
    for index, time in enumerate(profile.times):
        while left < min(num, index) and ends[left] <= time:
            held -= profile.sizes[left]
            left += 1
        held += profile.sizes[index]
        peak = max(peak, held)
    ahead_bytes = read_ahead_bytes if profile.copies is None else profile.copies.ahead_bytes
    gone = sum(profile.sizes[: min(num, bisect_right(ends, profile.forward_seconds))])
    return max(peak, sum(profile.sizes) - gone + min(ahead_bytes, gone))


def _wanted(profile: Profile, index: int) -> float:
    """Return when backward wants an entry, if it never waits before."""
    before_end = profile.forward_seconds - profile.times[index]
    return profile.forward_seconds + before_end * profile.backward_seconds / profile.forward_seconds


def _left_by_end(profile: Profile, *, pool_bytes: int) -> int:
    """Return how many entries can leave before backward begins."""
    return bisect_right(_leave_ends(profile, pool_bytes=pool_bytes), profile.forward_seconds)


def _leave_ends(profile: Profile, *, pool_bytes: int) -> list[float]:
    """Return when each entry is written if all are, or copied into the pool if it lies on a device."""
    copied = written = 0.0
    copied_ends: list[float] = []
    written_ends: list[float] = []
    sums = list(accumulate(profile.sizes, initial=0))
    for index, (ready, size) in enumerate(zip(profile.times, profile.sizes, strict=True)):
        if profile.copies is not None:
            # So many of the older ones must be written before the pool has room.
            num = bisect_left(sums, sums[index + 1] - pool_bytes)
            room = (written_ends[num - 1] if num else 0.0) if num <= index else inf
            ready = copied = max(copied, ready, room) + size / profile.copies.out_rate
            copied_ends.append(copied)
        written = max(written, ready) + size / profile.write_rate
        written_ends.append(written)
    return written_ends if profile.copies is None else copied_ends


def _first(end: int, holds: Callable[[int], bool]) -> int:
    """Return the first number from 0 on for which something holds that holds for all larger ones; ``end`` if none."""
    begin = 0
    while begin < end:
        middle = (begin + end) // 2
        if holds(middle):
            end = middle
        else:
            begin = middle + 1
    return begin
