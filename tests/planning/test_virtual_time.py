"""Virtual time equals sums worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.planning.simulator.virtual_time import Path, Pool, Process, Resource, Simulation


def ends_of(works: list[tuple[float, Path, float]]) -> list[float]:
    """Return when works end that have these beginnings, paths and units.

    A wait is work on a resource of its own.
    """
    simulation = Simulation()
    ends = [0.0] * len(works)

    def run(number: int, begin: float, path: Path, units: float) -> Process:
        yield simulation.work(Path(((Resource("wait"), 1.0),)), begin)
        yield simulation.work(path, units)
        ends[number] = simulation.now

    for number, work in enumerate(works):
        simulation.start(run(number, *work))
    simulation.run()
    return ends


def test_one_after_the_other() -> None:
    """Work alone on a resource takes its units times its seconds per unit."""
    disk = Path(((Resource("disk"), 0.5),))
    assert ends_of([(0, disk, 4), (2, disk, 2)]) == [2, 3]


def test_what_overlaps_shares_evenly() -> None:
    """The second begins when the first is half done, and both run at half the rate until the first ends."""
    disk = Path(((Resource("disk"), 1.0),))
    assert ends_of([(0, disk, 4), (2, disk, 4)]) == [6, 8]


def test_reads_and_writes_that_share_a_disk_get_equal_time() -> None:
    """A read at 4 per second and a write at 1 per second each get half of the disk's seconds."""
    disk = Resource("disk")
    read, write = Path(((disk, 0.25),)), Path(((disk, 1.0),))
    assert ends_of([(0, read, 4), (0, write, 4)]) == [2, 5]


def test_reads_and_writes_of_a_duplex_disk_do_not_meet() -> None:
    """Reads and writes each have the rate that they have alone."""
    read, write = Path(((Resource("reads"), 0.25),)), Path(((Resource("writes"), 1.0),))
    assert ends_of([(0, read, 4), (0, write, 4)]) == [1, 4]


def test_a_path_goes_at_the_rate_of_its_slowest_resource() -> None:
    """On a shared channel each gets the same part of its own rate, and others use what one leaves."""
    channel, slow = Resource("channel"), Resource("slow")
    through = Path(((channel, 1.0), (slow, 4.0)))  # 0.25 per second alone
    other = Path(((channel, 1.0),))
    assert ends_of([(0, through, 1)]) == [4]
    assert ends_of([(0, through, 0.75 + 0.25), (0, other, 3)]) == pytest.approx([3.75 + 1, 3.75])  # 0.2 and 0.8
    first, second = Path(((slow, 4.0), (channel, 1.0))), Path(((slow, 4.0),))
    assert ends_of([(0, first, 1), (0, second, 1), (0, other, 0.875 * 8)]) == pytest.approx([8, 8, 8])


def test_copies_count_on_what_they_share() -> None:
    """One of four copies takes as long on a shared resource as all four, and no longer on its own resource."""
    shared, own = Path(((Resource("shared", copies=4), 1.0),)), Path(((Resource("own"), 1.0),))
    assert ends_of([(0, shared, 1)]) == [4]
    assert ends_of([(0, own, 1)]) == [1]


@given(units=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), copies=st.integers(1, 4))
def test_a_busy_resource_is_never_idle(units: list[float], copies: int) -> None:
    """However many share a resource, the last ends after the total time of the work."""
    disk = Path(((Resource("disk", copies), 0.5),))
    assert max(ends_of([(0, disk, each) for each in units])) == pytest.approx(0.5 * copies * sum(units))


@given(units=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), rate=st.floats(0.1, 10))
def test_a_copy_ends_with_what_it_stands_for(units: list[float], rate: float) -> None:
    """One device that stands for three on a channel ends when each of three simulated devices does."""
    channel = Resource("channel")
    together = ends_of([(0, Path(((channel, rate), (Resource("own"), 1.0))), each) for each in units for _ in range(3)])
    alone = Resource("channel", copies=3)
    one = ends_of([(0, Path(((alone, rate), (Resource("own"), 1.0))), each) for each in units])
    assert together[::3] == pytest.approx(one)
    assert together[1::3] == pytest.approx(one)


def test_a_pool_works_in_order() -> None:
    """Two threads take three jobs, and the third begins when the first of the others ends."""
    simulation = Simulation()
    pool, ends = Pool(simulation, 2), []

    def job(name: str, seconds: float) -> Process:
        yield simulation.work(Path(((Resource(name), 1.0),)), seconds)
        ends.append((name, simulation.now))

    for name, seconds in (("a", 3), ("b", 1), ("c", 1)):
        pool.push(job(name, seconds))
    assert simulation.run() == 3
    assert ends == [("b", 1), ("c", 2), ("a", 3)]


def test_nothing_takes_no_time() -> None:
    """Work of no units, or on no resource, ends at once."""
    assert ends_of([(0, Path(((Resource("disk"), 1.0),)), 0), (0, Path(()), 5)]) == [0, 0]
