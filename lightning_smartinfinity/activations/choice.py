"""Chooses how much of what a forward saves is offloaded. This is pure arithmetic on one measured micro-batch.

The entries of a forward are numbered in the order in which they were packed, and backward wants them in reverse. The
oldest ones are offloaded and the newest ones are kept. The model of a storage device is simple:

- Writes take place one after the other, each as soon as its entry was packed. Those that have not ended when backward
  begins are cancelled: their entries are still in memory and are forwarded.
- Reads begin with backward and take place one after the other. At most ``read_ahead_bytes`` are read and not yet used.
- Backward wants an entry as long after its begin as the entry was packed before the end of forward, stretched by how
  much longer backward takes than forward.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Choice", "Profile", "choose", "fitting", "peak_of", "stall_of", "without_stall"]


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
    """

    times: tuple[float, ...]
    sizes: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    write_rate: float
    read_rate: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Part that is offloaded, and its predicted cost.

    Args:
        num_offloaded: Number of the oldest entries that are offloaded.
        offloaded_bytes: Their bytes.
        kept_bytes: Bytes of the other entries.
        seconds: Predicted time of forward and backward, with that.
        stall_seconds: Time for which backward is predicted to wait for storage.
        peak_bytes: Most bytes that are predicted to be held for backward at once.
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
        num = without_stall(profile, read_ahead_bytes=read_ahead_bytes)
    if most_bytes is not None:
        num = min(num, bisect_right(sums, most_bytes) - 1)
    peak = peak_of(profile, num, read_ahead_bytes=read_ahead_bytes)
    with_pool = sums[-1] - sums[num] + min(pool_bytes, sums[num])
    stall = stall_of(profile, num, read_ahead_bytes=read_ahead_bytes)
    return Choice(
        num_offloaded=num,
        offloaded_bytes=sums[num],
        kept_bytes=sums[-1] - sums[num],
        seconds=profile.forward_seconds + profile.backward_seconds + stall,
        stall_seconds=stall,
        peak_bytes=max(peak, with_pool if budget_bytes is None else min(with_pool, budget_bytes)),
    )


def without_stall(profile: Profile, *, read_ahead_bytes: int) -> int:
    """Return how many of the oldest entries can be offloaded so that backward waits for none of them.

    What storage cannot write before backward begins is not offloaded.
    """
    written = _written_by(profile, profile.forward_seconds)
    # One more entry delays every read of the others, so that backward also waits with all larger numbers.
    return _first(written, lambda num: stall_of(profile, num + 1, read_ahead_bytes=read_ahead_bytes) > 0)


def fitting(profile: Profile, *, budget_bytes: int, read_ahead_bytes: int) -> int:
    """Return the least number of the oldest entries that must be offloaded so that the rest fits into a budget.

    If nothing fits, it is the number of all entries.
    """
    return _first(
        len(profile.sizes), lambda num: peak_of(profile, num, read_ahead_bytes=read_ahead_bytes) <= budget_bytes
    )


def stall_of(profile: Profile, num: int, *, read_ahead_bytes: int) -> float:
    """Return for how many seconds backward waits for storage if the oldest ``num`` entries are offloaded."""
    num = min(num, _written_by(profile, profile.forward_seconds))
    sizes, begin = profile.sizes, profile.forward_seconds
    used: dict[int, float] = {}
    ready, late = begin, 0.0
    first_unused = num - 1  # the newest entry whose bytes count as read ahead
    ahead = 0
    for index in reversed(range(num)):
        start = ready
        while ahead and ahead + sizes[index] > read_ahead_bytes:
            ahead -= sizes[first_unused]
            start = max(start, used[first_unused])
            first_unused -= 1
        ahead += sizes[index]
        ready = start + sizes[index] / profile.read_rate
        wanted = _wanted(profile, index)
        late = max(late, ready - wanted)
        used[index] = wanted + late
    return late


def peak_of(profile: Profile, num: int, *, read_ahead_bytes: int) -> int:
    """Return the most bytes that are held for backward at once if the oldest ``num`` entries are offloaded."""
    held = peak = 0
    ends, left = _write_ends(profile), 0
    for index, time in enumerate(profile.times):
        while left < min(num, index) and ends[left] <= time:
            held -= profile.sizes[left]
            left += 1
        held += profile.sizes[index]
        peak = max(peak, held)
    written = sum(profile.sizes[: min(num, _written_by(profile, profile.forward_seconds))])
    return max(peak, sum(profile.sizes) - written + min(read_ahead_bytes, written))


def _wanted(profile: Profile, index: int) -> float:
    """Return when backward wants an entry, if it never waits before."""
    before_end = profile.forward_seconds - profile.times[index]
    return profile.forward_seconds + before_end * profile.backward_seconds / profile.forward_seconds


def _write_ends(profile: Profile) -> list[float]:
    """Return when the write of each entry has ended if all are written."""
    end, ends = 0.0, []
    for time, size in zip(profile.times, profile.sizes, strict=True):
        end = max(end, time) + size / profile.write_rate
        ends.append(end)
    return ends


def _written_by(profile: Profile, time: float) -> int:
    """Return how many entries are written by a time."""
    return bisect_right(_write_ends(profile), time)


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
