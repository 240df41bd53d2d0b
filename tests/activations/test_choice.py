"""How much is offloaded: the choice is that of a search through every possibility, in a simulation of its own."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from lightning_smartinfinity.activations.tuning.choice import Copies, Profile, choose, peak_of, stall_of


def random_profile(choose_from: random.Random, *, on_device: bool) -> Profile:
    num = choose_from.randint(1, 9)
    forward = choose_from.uniform(0.1, 4)
    rates = [choose_from.choice([0.5, 3.0, 20.0, 1e6]) * choose_from.uniform(0.5, 2) for _ in range(4)]
    copies = Copies(out_rate=rates[2], in_rate=rates[3], ahead_bytes=choose_from.randint(1, 30))
    return Profile(
        times=tuple(sorted(choose_from.uniform(0, forward) for _ in range(num))),
        sizes=tuple(choose_from.choice([1, 2, 5, choose_from.randint(1, 20)]) for _ in range(num)),
        forward_seconds=forward,
        backward_seconds=choose_from.choice([0.0, choose_from.uniform(0, 3 * forward)]),
        write_rate=rates[0],
        read_rate=rates[1],
        copies=copies if on_device else None,
    )


def evicted_entries(profile: Profile, pool: int) -> list[float]:
    """Return when each entry is written, or copied from a device, of all that are before backward begins."""
    copied, ends, written = 0.0, list[float](), list[float]()
    for index, (ready, size) in enumerate(zip(profile.times, profile.sizes, strict=True)):
        if profile.copies is not None:
            begin = max(copied, ready)
            # The pool has what was copied and is not written yet.
            for end in written:
                if sum(profile.sizes[other] for other in range(index) if written[other] > begin) + size > pool:
                    begin = max(begin, end)
            copied = begin + size / profile.copies.out_rate if size <= pool else math.inf
            ready = copied
        written.append(max([ready, *written[-1:]]) + size / profile.write_rate)
        ends.append(written[-1] if profile.copies is None else copied)
    return [end for end in ends if end <= profile.forward_seconds]


def simulated_reads(profile: Profile, waiting: list[int], *, rate: float, read_ahead: int) -> float:
    """Backward one entry after the other: each waits until it is read, and every read waits for room."""
    reading_until, now_late = profile.forward_seconds, 0.0
    read: list[int] = []  # in order
    used_at: dict[int, float] = {}
    for index in waiting:
        begin = reading_until
        # The entries that are used first make room first.
        for other in read:
            unused = sum(profile.sizes[each] for each in read if used_at[each] > begin)
            if unused and unused + profile.sizes[index] > read_ahead:
                begin = max(begin, used_at[other])
        reading_until = begin + profile.sizes[index] / rate
        part = (profile.forward_seconds - profile.times[index]) / profile.forward_seconds
        planned = profile.forward_seconds + part * profile.backward_seconds
        now_late += max(0.0, reading_until - (planned + now_late))
        used_at[index] = planned + now_late
        read.append(index)
    return now_late


def simulated(profile: Profile, pool: int, ahead: int) -> tuple[list[float], list[int]]:
    """Return for how long backward waits, and the most bytes that are held, for each number of offloaded entries."""
    sizes, copies = profile.sizes, profile.copies
    stalls, peaks = list[float](), list[int]()
    for num in range(len(sizes) + 1):
        ends = evicted_entries(profile, pool)[:num]
        evicted = range(len(ends))
        # From a device, what the pool has room for need not be written, and what is read is copied, too.
        in_pool = 0 if copies is None else pool
        on_storage = [index for index in reversed(evicted) if sum(sizes[index : len(ends)]) > in_pool]
        stall = simulated_reads(profile, on_storage, rate=profile.read_rate, read_ahead=ahead)
        if copies is not None:
            waiting = list(reversed(evicted))
            stall = max(stall, simulated_reads(profile, waiting, rate=copies.in_rate, read_ahead=copies.ahead_bytes))
        stalls.append(stall)
        held = [
            sum(sizes[: count + 1]) - sum(sizes[index] for index in evicted if ends[index] <= now and index < count)
            for count, now in enumerate(profile.times)
        ]
        gone = sum(sizes[: len(ends)])
        peaks.append(max(*held, sum(sizes) - gone + min(gone, ahead if copies is None else copies.ahead_bytes)))
    return stalls, peaks


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_against_every_possibility(seed: int, on_device: bool) -> None:
    """In a thousand random profiles, the choice is the best of all suffixes that can be kept."""
    chosen = random.Random(seed)
    for _ in range(1000):
        profile = random_profile(chosen, on_device=on_device)
        pool = chosen.choice([chosen.randint(2, 60), 10**6])
        ahead, sizes, everything = pool // 2, profile.sizes, range(len(profile.sizes) + 1)
        stalls, peaks = simulated(profile, pool, ahead)
        for num in everything:
            stall = stall_of(profile, num, pool_bytes=pool, read_ahead_bytes=ahead)
            assert stall == pytest.approx(stalls[num], abs=1e-9)
            assert peak_of(profile, num, pool_bytes=pool, read_ahead_bytes=ahead) == peaks[num]
        settings = {"keep": "auto", "budget_bytes": None, "pool_bytes": pool, "read_ahead_bytes": ahead}
        free = max(num for num in everything if num <= len(evicted_entries(profile, pool)) and stalls[num] == 0)
        automatic = choose(profile, **settings)
        assert (automatic.num_offloaded, automatic.stall_seconds) == (free, 0)
        assert automatic.offloaded_bytes + automatic.kept_bytes == sum(sizes)
        # Without a device, the pool is full of what was written, or has all of it.
        with_pool = 0 if on_device else sum(sizes[free:]) + min(pool, sum(sizes[:free]))
        assert automatic.peak_bytes == max(peaks[free], with_pool)
        # A budget counts the pool, too, so that it is kept as where there is no device.
        budget = chosen.randint(1, sum(sizes))
        _, counted = simulated(dataclasses.replace(profile, copies=None), pool, ahead)
        within = choose(profile, **settings | {"budget_bytes": budget})
        assert within.num_offloaded == min((num for num in everything if counted[num] <= budget), default=len(sizes))
        assert within.peak_bytes <= max(budget, counted[within.num_offloaded])
        unhindered = profile.forward_seconds + profile.backward_seconds
        assert within.seconds == pytest.approx(unhindered + stalls[within.num_offloaded])
        keep, most = chosen.randint(0, sum(sizes)), chosen.randint(0, sum(sizes))
        explicit = choose(profile, **settings | {"keep": keep})
        assert explicit.num_offloaded == min(num for num in everything if sum(sizes[num:]) <= keep)
        fewer = choose(profile, **settings | {"most_bytes": most})
        assert fewer.num_offloaded == max(num for num in everything if num <= free and sum(sizes[:num]) <= most)
