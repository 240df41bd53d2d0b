"""How much is offloaded: the choice is that of a search through every possibility, in a simulation of its own."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lightning_smartinfinity.activations.tuning.choice import Copies, Profile, choose, peak_of, stall_of

MOST_RATIO = 1e-9


def random_profile(choose_from: random.Random) -> Profile:
    num = choose_from.randint(1, 9)
    forward = choose_from.uniform(0.1, 4)
    rates = [choose_from.choice([0.5, 3.0, 20.0, 1e6]) * choose_from.uniform(0.5, 2) for _ in range(2)]
    return Profile(
        times=tuple(sorted(choose_from.uniform(0, forward) for _ in range(num))),
        sizes=tuple(choose_from.choice([1, 2, 5, choose_from.randint(1, 20)]) for _ in range(num)),
        forward_seconds=forward,
        backward_seconds=choose_from.choice([0.0, choose_from.uniform(0, 3 * forward)]),
        write_rate=rates[0],
        read_rate=rates[1],
    )


def written_entries(profile: Profile, num: int) -> list[tuple[int, float]]:
    """Return the entries that are written before backward begins, with the times at which their writes end."""
    free, ended = 0.0, []
    for index in range(num):
        free = max(free, profile.times[index]) + profile.sizes[index] / profile.write_rate
        if free <= profile.forward_seconds:
            ended.append((index, free))
    return ended


def simulated_stall(profile: Profile, num: int, read_ahead: int) -> float:
    waiting = [index for index, _ in reversed(written_entries(profile, num))]
    return simulated_reads(profile, waiting, rate=profile.read_rate, read_ahead=read_ahead)


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


def simulated_peak(profile: Profile, num: int, read_ahead: int) -> int:
    written = written_entries(profile, num)
    peaks = []
    for count, now in enumerate(profile.times, start=1):
        gone = sum(profile.sizes[index] for index, end in written if end <= now and index < count - 1)
        peaks.append(sum(profile.sizes[:count]) - gone)
    on_storage = sum(profile.sizes[index] for index, _ in written)
    peaks.append(sum(profile.sizes) - on_storage + min(on_storage, read_ahead))
    return max(peaks)


@pytest.mark.parametrize("seed", range(3))
def test_against_every_possibility(seed: int) -> None:
    """In a thousand random profiles, the choice is the best of all suffixes that can be kept."""
    chosen = random.Random(seed)
    for _ in range(1000):
        profile, read_ahead = random_profile(chosen), chosen.randint(1, 30)
        everything = range(len(profile.sizes) + 1)
        stalls = [simulated_stall(profile, num, read_ahead) for num in everything]
        peaks = [simulated_peak(profile, num, read_ahead) for num in everything]
        for num in everything:
            assert stall_of(profile, num, pool_bytes=0, read_ahead_bytes=read_ahead) == pytest.approx(
                stalls[num], abs=MOST_RATIO
            )
            assert peak_of(profile, num, pool_bytes=0, read_ahead_bytes=read_ahead) == peaks[num]
        written = len(written_entries(profile, len(profile.sizes)))
        free = max(num for num in everything if num <= written and stalls[num] == 0)
        pool = 2 * read_ahead
        automatic = choose(profile, keep="auto", budget_bytes=None, pool_bytes=pool, read_ahead_bytes=read_ahead)
        assert automatic.num_offloaded == free and automatic.stall_seconds == 0
        assert automatic.offloaded_bytes + automatic.kept_bytes == sum(profile.sizes)
        # The pool is full of what was written, or has all of it.
        assert automatic.peak_bytes == max(
            peaks[free], sum(profile.sizes[free:]) + min(pool, sum(profile.sizes[:free]))
        )
        budget = chosen.randint(1, sum(profile.sizes))
        fits = [num for num in everything if peaks[num] <= budget]
        within = choose(profile, keep="auto", budget_bytes=budget, pool_bytes=pool, read_ahead_bytes=read_ahead)
        assert within.peak_bytes <= max(budget, peaks[within.num_offloaded])
        assert within.num_offloaded == min(fits, default=len(profile.sizes))
        unhindered = profile.forward_seconds + profile.backward_seconds
        assert within.seconds == pytest.approx(unhindered + stalls[within.num_offloaded])
        keep = chosen.randint(0, sum(profile.sizes))
        least = min(num for num in everything if sum(profile.sizes[num:]) <= keep)
        explicit = choose(profile, keep=keep, budget_bytes=None, pool_bytes=pool, read_ahead_bytes=read_ahead)
        assert explicit.num_offloaded == least
        most = chosen.randint(0, sum(profile.sizes))
        fewer = choose(
            profile, keep="auto", budget_bytes=None, pool_bytes=pool, read_ahead_bytes=read_ahead, most_bytes=most
        )
        assert fewer.num_offloaded == max(num for num in everything if num <= free and sum(profile.sizes[:num]) <= most)


def evicted_entries(profile: Profile, num: int, pool: int) -> list[tuple[int, float]]:
    """Return the entries that are copied from a device before backward begins, with the times at which they are."""
    assert profile.copies is not None
    sizes, copied, evicted = profile.sizes, 0.0, []
    written_until, written = 0.0, {}
    for index in range(num):
        begin = max(copied, profile.times[index])
        # The pool has what was copied and is not written yet.
        for other in range(index):
            in_pool = sum(sizes[each] for each in range(index) if written[each] > begin)
            if in_pool + sizes[index] > pool:
                begin = max(begin, written[other])
        if sizes[index] > pool:
            break
        copied = begin + sizes[index] / profile.copies.out_rate
        if copied > profile.forward_seconds:
            break
        written_until = max(written_until, copied) + sizes[index] / profile.write_rate
        written[index] = written_until
        evicted.append((index, copied))
    return evicted


@pytest.mark.parametrize("seed", range(3))
def test_devices_against_every_possibility(seed: int) -> None:
    """From a device, what the pool has room for need not be written, and what is read is copied, too."""
    chosen = random.Random(seed)
    for _ in range(1000):
        rates = [chosen.choice([1.0, 10.0, 1e6]) * chosen.uniform(0.5, 2) for _ in range(2)]
        copies = Copies(out_rate=rates[0], in_rate=rates[1], ahead_bytes=chosen.randint(1, 30))
        profile = dataclasses.replace(random_profile(chosen), copies=copies)
        pool, sizes = chosen.choice([chosen.randint(1, 60), 10**6]), profile.sizes
        ahead, everything = max(1, pool // 2), range(len(sizes) + 1)
        all_evicted = evicted_entries(profile, len(sizes), pool)
        stalls, peaks = [], []
        for num in everything:
            evicted = [(index, end) for index, end in all_evicted if index < num]
            in_pool = [index for index, _ in evicted if sum(sizes[num] for num, _ in evicted if num >= index) <= pool]
            waiting = [index for index, _ in reversed(evicted)]
            on_storage = [index for index in waiting if index not in in_pool]
            copied = simulated_reads(profile, waiting, rate=copies.in_rate, read_ahead=copies.ahead_bytes)
            read = simulated_reads(profile, on_storage, rate=profile.read_rate, read_ahead=ahead)
            stalls.append(max(copied, read))
            gone = [
                sum(sizes[index] for index, end in evicted if end <= now and index < count)
                for count, now in enumerate(profile.times)
            ]
            held = [sum(sizes[: count + 1]) - gone[count] for count in range(len(sizes))]
            evicted_bytes = sum(sizes[index] for index, _ in evicted)
            peaks.append(max(*held, sum(sizes) - evicted_bytes + min(evicted_bytes, copies.ahead_bytes)))
            found = stall_of(profile, num, pool_bytes=pool, read_ahead_bytes=ahead)
            assert found == pytest.approx(stalls[num], abs=MOST_RATIO)
            assert peak_of(profile, num, pool_bytes=pool, read_ahead_bytes=ahead) == peaks[num]
        free = max(num for num in everything if num <= len(all_evicted) and stalls[num] == 0)
        automatic = choose(profile, keep="auto", budget_bytes=None, pool_bytes=pool, read_ahead_bytes=ahead)
        assert (automatic.num_offloaded, automatic.stall_seconds) == (free, 0)
        assert automatic.peak_bytes == peaks[free]
        # A budget counts the pool, too, so that it is kept as where there is no device.
        budget = chosen.randint(1, sum(sizes))
        without = dataclasses.replace(profile, copies=None)
        within, on_host = (
            choose(each, keep="auto", budget_bytes=budget, pool_bytes=pool, read_ahead_bytes=ahead)
            for each in (profile, without)
        )
        assert (within.num_offloaded, within.peak_bytes) == (on_host.num_offloaded, on_host.peak_bytes)
