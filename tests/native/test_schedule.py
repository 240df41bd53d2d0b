"""The schedule of a batch under any order of completions."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import TransferSchedule
from lightning_smartinfinity.storage.spread import apportion, interleave
from tests.helpers.native_testing import extend_resident

sizes = st.integers(0, 12)
buffers = st.integers(1, 5)
stage_sets = st.fixed_dictionaries({name: st.booleans() for name in ("reads", "writes", "fetches", "delivers")})


class Simulation:
    """A simulation that starts what the schedule asks for and ends actions in an order chosen by hypothesis."""

    def __init__(self, num_tasklets: int, num_buffers: int, **stages: bool) -> None:
        self.num_buffers = self.num_ring = num_buffers
        self.resident: set[int] = set()
        self.schedule = TransferSchedule(num_tasklets, num_buffers, **stages)
        self.in_flight: dict[tuple[int, bool], tuple[str, int]] = {}
        self.started: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []
        self.failed: set[int] = set()

    def start(self) -> list[str]:
        actions = self.schedule.next()
        for action, tasklet, buffer in actions:
            others = [other for (held, _), (_, other) in self.in_flight.items() if held == buffer]
            assert all(other == tasklet for other in others), "a buffer holds one tasklet at a time"
            place = (buffer, action == "deliver")  # a delivery may run beside a write
            assert place not in self.in_flight
            assert 0 <= buffer < self.num_buffers
            assert (buffer >= self.num_ring) == (tasklet in self.resident)
            self.in_flight[place] = (action, tasklet)
            self.started.append((action, tasklet))
        assert self.schedule.next() == []
        return [action for action, _, _ in actions]

    def end(self, data: st.DataObject, *, fail: bool = False) -> None:
        place = data.draw(st.sampled_from(sorted(self.in_flight)))
        action, tasklet = self.in_flight.pop(place)
        self.ended.append((action, tasklet))
        if fail:
            self.schedule.fail(action, tasklet)
            self.failed.add(tasklet)
        else:
            self.schedule.done(action, tasklet)

    def run(self, data: st.DataObject) -> None:
        self.start()
        while not self.schedule.finished:
            self.end(data)
            self.start()


@given(num_tasklets=sizes, num_buffers=buffers, stages=stage_sets, data=st.data())
def test_every_tasklet_once(num_tasklets: int, num_buffers: int, stages: dict[str, bool], data: st.DataObject) -> None:
    """Any order finishes. Each tasklet is read, fetched, computed, and then written and delivered, once."""
    simulation = Simulation(num_tasklets, num_buffers, **stages)
    simulation.run(data)
    before = ["read"] * stages["reads"] + ["fetch"] * stages["fetches"] + ["compute"]
    after = ["write"] * stages["writes"] + ["deliver"] * stages["delivers"]
    expected = {(stage, tasklet): 1 for stage in before + after for tasklet in range(num_tasklets)}
    assert Counter(simulation.started) == expected
    for tasklet in range(num_tasklets):
        started = [action for action, of in simulation.started if of == tasklet]
        assert started[: len(before)] == before
        for first, second in [*itertools.pairwise(before), *(("compute", leg) for leg in after)]:
            ended = simulation.ended.index((first, tasklet))
            assert ended < simulation.ended.index((second, tasklet))
    assert simulation.in_flight == {}
    assert simulation.schedule.complete() == [True] * num_tasklets


@given(parts=st.lists(st.integers(0, 5), min_size=2, max_size=5), num_buffers=buffers, data=st.data())
def test_tasklets_that_come_later(parts: list[int], num_buffers: int, data: st.DataObject) -> None:
    """Tasklets added later are worked like the others, after them, whether the ring is busy or idle."""
    simulation = Simulation(parts[0], num_buffers, reads=True, writes=True)
    for part in parts[1:]:
        simulation.start()
        for _ in range(data.draw(st.integers(0, 8))):
            if simulation.in_flight:
                simulation.end(data)
                simulation.start()
        simulation.schedule.extend(part)
    simulation.run(data)
    total = sum(parts)
    assert [tasklet for action, tasklet in simulation.started if action == "read"] == list(range(total))
    assert Counter(simulation.ended) == {(a, t): 1 for a in ("read", "compute", "write") for t in range(total)}


@given(num_tasklets=sizes, num_buffers=buffers, data=st.data())
def test_preferred_tasklets_are_begun_next(num_tasklets: int, num_buffers: int, data: st.DataObject) -> None:
    """Preferred tasklets that have not begun come next, the last request first. The others keep the list order."""
    simulation = Simulation(num_tasklets, num_buffers, reads=True, writes=True)
    resident = data.draw(st.integers(0, 3))
    extend_resident(simulation.schedule, resident, reads=False, writes=False)
    simulation.num_buffers *= 2
    simulation.resident = set(range(num_tasklets, num_tasklets + resident))
    waiting = list(range(num_tasklets))
    for _ in range(data.draw(st.integers(1, 3))):
        simulation.start()
        begun = [tasklet for action, tasklet in simulation.started if action == "read"]
        waiting = [tasklet for tasklet in waiting if tasklet not in begun]
        preferred = data.draw(st.permutations(range(num_tasklets + resident)))[: data.draw(st.integers(0, 6))]
        simulation.schedule.prefer(preferred)
        waiting.sort(key=lambda tasklet: preferred.index(tasklet) if tasklet in preferred else len(preferred))
        if simulation.in_flight:
            simulation.end(data)
    before = len([action for action, _ in simulation.started if action == "read"])
    simulation.run(data)
    assert [tasklet for action, tasklet in simulation.started if action == "read"][before:] == waiting
    assert Counter(simulation.ended) == Counter(
        [(a, t) for a in ("read", "compute", "write") for t in range(num_tasklets)]
        + [("compute", t) for t in range(num_tasklets, num_tasklets + resident)]
    )


resident_parts = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans(), st.booleans()), max_size=5)


@given(parts=resident_parts, num_buffers=buffers, stages=stage_sets, data=st.data())
def test_resident_tasklets(
    parts: list[tuple[int, bool, bool, bool]], num_buffers: int, stages: dict[str, bool], data: st.DataObject
) -> None:
    """Each resident tasklet runs its own stages once, outside the ring's buffers. Both kinds begin in list order."""
    simulation = Simulation(0, num_buffers, **stages)
    simulation.num_buffers *= 2
    ways: list[tuple[bool, bool, bool]] = []
    for number, resident, reads, writes in parts:
        way = (resident, reads, writes) if resident else (False, stages["reads"], stages["writes"])
        ways += [way] * number
        if resident:
            extend_resident(simulation.schedule, number, reads=reads, writes=writes)
        else:
            simulation.schedule.extend(number)
        simulation.resident = {tasklet for tasklet, (is_resident, _, _) in enumerate(ways) if is_resident}
        if data.draw(st.booleans()):
            simulation.start()
    simulation.run(data)
    for tasklet, (_, reads, writes) in enumerate(ways):
        done = {
            "read": reads,
            "fetch": stages["fetches"],
            "compute": True,
            "write": writes,
            "deliver": stages["delivers"],
        }
        assert Counter(name for name, of in simulation.ended if of == tasklet) == {n: 1 for n, on in done.items() if on}
    for kind in (True, False):
        begun = list(dict.fromkeys(of for _, of in simulation.started if ways[of][0] == kind))
        assert begun == sorted(begun)


@given(num_resident=st.integers(1, 12), num_tasklets=st.integers(1, 12), num_buffers=buffers)
def test_resident_tasklets_never_wait_for_the_ring(num_resident: int, num_tasklets: int, num_buffers: int) -> None:
    """Resident tasklets are computed while every buffer of the ring is still being read into."""
    schedule = TransferSchedule(num_tasklets, num_buffers, reads=True, writes=True)
    extend_resident(schedule, num_resident, reads=False, writes=False)
    reading = 0
    while actions := schedule.next():
        reading += sum(action == "read" for action, _, _ in actions)
        for action, tasklet, _ in actions:
            if action == "compute":
                schedule.done(action, tasklet)
    assert reading == min(num_tasklets, num_buffers)
    assert all(schedule.parameters_out(num_tasklets + index) for index in range(num_resident))
    assert not schedule.finished


@given(num_tasklets=st.integers(1, 12), num_buffers=buffers, data=st.data())
def test_a_buffer_is_used_again_after_its_delivery(num_tasklets: int, num_buffers: int, data: st.DataObject) -> None:
    """A buffer takes no other tasklet until its delivery has ended, even if its write ends earlier."""
    simulation = Simulation(num_tasklets, num_buffers, reads=True, writes=True, delivers=True)
    simulation.start()
    while not simulation.schedule.finished:
        started = [tasklet for action, tasklet in simulation.started if action == "read"]
        delivered = [tasklet for action, tasklet in simulation.ended if action == "deliver"]
        assert len(started) - len(delivered) <= num_buffers
        simulation.end(data)
        simulation.start()


@given(num_tasklets=sizes, num_buffers=buffers, data=st.data())
def test_order(num_tasklets: int, num_buffers: int, data: st.DataObject) -> None:
    """Actions that free buffers start before reads, and tasklets are read in list order."""
    simulation = Simulation(num_tasklets, num_buffers, reads=True, writes=True, fetches=True, delivers=True)
    preference = {"deliver": 0, "write": 1, "compute": 2, "fetch": 3, "read": 4}
    while True:
        actions = simulation.start()
        assert actions == sorted(actions, key=preference.__getitem__)
        if simulation.schedule.finished:
            break
        for _ in range(data.draw(st.integers(1, len(simulation.in_flight)))):
            simulation.end(data)
    assert [tasklet for action, tasklet in simulation.started if action == "read"] == list(range(num_tasklets))


@given(num_tasklets=sizes, num_buffers=buffers, reads=st.booleans(), writes=st.booleans(), data=st.data())
def test_parameters_are_out_with_the_end_of_compute(
    num_tasklets: int, num_buffers: int, reads: bool, writes: bool, data: st.DataObject
) -> None:
    """A tasklet's parameters count as updated exactly from the end of compute, before its write starts."""
    simulation = Simulation(num_tasklets, num_buffers, reads=reads, writes=writes)
    while not simulation.schedule.finished:
        simulation.start()
        for action, tasklet in simulation.started:
            assert action != "write" or simulation.schedule.parameters_out(tasklet)
        if simulation.in_flight:
            simulation.end(data)
        for tasklet in range(num_tasklets):
            assert simulation.schedule.parameters_out(tasklet) == (("compute", tasklet) in simulation.ended)


@given(num_tasklets=st.integers(1, 12), num_buffers=buffers, data=st.data())
def test_a_failure_lets_the_others_finish(num_tasklets: int, num_buffers: int, data: st.DataObject) -> None:
    """After a failure only deliveries of computed tasklets start, and the batch ends when nothing is in flight.

    A delivery waits for copies that began with the end of compute, so it cannot be left out.
    """
    simulation = Simulation(num_tasklets, num_buffers, reads=True, writes=True, fetches=True, delivers=True)
    simulation.start()
    for _ in range(data.draw(st.integers(0, 5 * num_tasklets - 1))):
        simulation.end(data)
        simulation.start()
    simulation.end(data, fail=True)
    simulation.start()
    while simulation.in_flight:
        assert not simulation.schedule.finished
        simulation.end(data, fail=data.draw(st.booleans()))
        assert set(simulation.start()) <= {"deliver"}
    computed = [tasklet for tasklet in range(num_tasklets) if simulation.schedule.parameters_out(tasklet)]
    delivered = [tasklet for action, tasklet in simulation.ended if action == "deliver"]
    assert sorted(delivered) == computed
    written = {tasklet for action, tasklet in simulation.ended if action == "write"}
    assert [index for index, complete in enumerate(simulation.schedule.complete()) if complete] == sorted(
        (written & set(delivered)) - simulation.failed
    )
    assert simulation.start() == []
    assert simulation.schedule.finished


@given(num_tasklets=st.integers(3, 12), data=st.data())
def test_the_ring_is_used(num_tasklets: int, data: st.DataObject) -> None:
    """No buffer is idle while there are tasklets to read."""
    simulation = Simulation(num_tasklets, 3, reads=True, writes=True)
    simulation.start()
    while len([action for action, _ in simulation.started if action == "read"]) < num_tasklets:
        assert len(simulation.in_flight) == 3
        simulation.end(data)
        simulation.start()


def test_nothing_to_do() -> None:
    """A batch without tasklets is finished from the start."""
    schedule = TransferSchedule(0, 2, reads=True, writes=True)
    assert schedule.next() == []
    assert schedule.finished


@pytest.mark.parametrize(("action", "tasklet"), [("compute", 0), ("write", 0), ("read", 1), ("read", 7)])
def test_an_action_that_is_not_in_flight(action: str, tasklet: int) -> None:
    """An action that is not in flight cannot end."""
    schedule = TransferSchedule(2, 1, reads=True, writes=True)
    assert schedule.next() == [("read", 0, 0)]
    with pytest.raises(ValueError, match=f"tasklet {tasklet}"):
        schedule.done(action, tasklet)


def test_bad_arguments() -> None:
    """A ring without buffers, an unknown action and a tasklet outside the batch are refused."""
    with pytest.raises(ValueError, match="num_buffers"):
        TransferSchedule(1, 0, reads=True, writes=True)
    schedule = TransferSchedule(1, 1, reads=True, writes=True)
    with pytest.raises(ValueError, match="unknown action erase"):
        schedule.done("erase", 0)
    with pytest.raises(IndexError):
        schedule.parameters_out(1)


def seconds_of_a_step(devices: list[int], seconds: list[float], *, num_buffers: int) -> float:
    """Return the duration of a step in virtual time.

    Each device reads and writes one tasklet at a time. Computing takes no time.

    Args:
        devices: Device of each tasklet.
        seconds: Seconds in which each device reads or writes a tasklet.
        num_buffers: Buffers of the ring.
    """
    schedule = TransferSchedule(len(devices), num_buffers, reads=True, writes=True)
    free_at, now = [0.0] * len(seconds), 0.0
    in_flight: list[tuple[float, str, int]] = []
    while not schedule.finished:
        for work, tasklet, _ in schedule.next():
            device = devices[tasklet]
            if work != "compute":
                free_at[device] = max(free_at[device], now) + seconds[device]
            in_flight.append((now if work == "compute" else free_at[device], work, tasklet))
        in_flight.sort()
        now, work, tasklet = in_flight.pop(0)
        schedule.done(work, tasklet)
    return now


@pytest.mark.parametrize("slowness", [1, 2, 5, 20])
@pytest.mark.parametrize("num_buffers", [4, 16])
def test_a_slow_device_holds_up_nobody(slowness: int, num_buffers: int) -> None:
    """A step takes as long as the slowest device needs for its own tasklets, with equal and proportional shares.

    A slow device with as many tasklets as the others comes to hold all buffers, but then the step lasts as long as that
    device's part of it anyway.
    """
    seconds = [1.0, float(slowness)]
    for counts in (apportion([1, 1], 120), apportion([slowness, 1], 120)):
        alone = max(2 * count * each for count, each in zip(counts, seconds, strict=True))
        assert alone <= seconds_of_a_step(interleave(counts).tolist(), seconds, num_buffers=num_buffers) < 1.1 * alone
