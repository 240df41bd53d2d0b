"""The schedule of a batch under any order of completions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import TransferSchedule
from tests.helpers.native_testing import extend_resident

sizes = st.integers(0, 12)
buffers = st.integers(1, 5)
PREFERENCE = {"deliver": 0, "write": 1, "compute": 2, "fetch": 3, "read": 4}
Stages = dict[str, bool]
stage_sets = st.fixed_dictionaries({name: st.booleans() for name in ("reads", "writes", "fetches", "delivers")})


class Simulation:
    """A simulation that starts what the schedule asks for and ends actions in an order chosen by hypothesis.

    Whatever happens, a buffer holds one tasklet from its read to its write and delivery, actions that free buffers
    start before others, and a tasklet's parameters count as updated from the end of compute.
    """

    def __init__(self, num_tasklets: int, num_buffers: int, **stages: bool) -> None:
        self.num_buffers = self.num_ring = num_buffers
        self.resident: set[int] = set()
        self.schedule = TransferSchedule(num_tasklets, num_buffers, **stages)
        self.in_flight: dict[tuple[int, bool], tuple[str, int]] = {}
        self.holders: dict[int, int] = {}
        self.started: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []
        self.failed: set[int] = set()
        self.last_leg = {name for name, on in (("write", "writes"), ("deliver", "delivers")) if stages.get(on)}

    def begun(self, action: str) -> list[int]:
        return [tasklet for name, tasklet in self.started if name == action]

    def start(self) -> list[str]:
        actions = self.schedule.next()
        for action, tasklet, buffer in actions:
            assert self.holders.setdefault(buffer, tasklet) == tasklet, "a buffer holds one tasklet at a time"
            place = (buffer, action == "deliver")  # a delivery may run beside a write
            assert place not in self.in_flight and 0 <= buffer < self.num_buffers
            assert (buffer >= self.num_ring) == (tasklet in self.resident)
            assert action not in ("write", "deliver") or self.schedule.parameters_out(tasklet)
            self.in_flight[place] = (action, tasklet)
            self.started.append((action, tasklet))
        assert self.schedule.next() == []
        of_the_ring = [action for action, tasklet, _ in actions if tasklet not in self.resident]
        assert of_the_ring == sorted(of_the_ring, key=PREFERENCE.__getitem__)
        return [action for action, _, _ in actions]

    def end(self, data: st.DataObject, *, fail: bool = False) -> None:
        place = data.draw(st.sampled_from(sorted(self.in_flight)))
        action, tasklet = self.in_flight.pop(place)
        assert self.schedule.parameters_out(tasklet) == (("compute", tasklet) in self.ended)
        self.ended.append((action, tasklet))
        legs = {name for name, of in self.ended if of == tasklet}
        if legs >= (self.last_leg or {"compute"}) or tasklet in self.resident:
            self.holders.pop(place[0], None)
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


parts_of_batches = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans(), st.booleans()), max_size=5)


@given(parts=parts_of_batches, num_buffers=buffers, stages=stage_sets, data=st.data())
def test_any_batch(
    parts: list[tuple[int, bool, bool, bool]], num_buffers: int, stages: Stages, data: st.DataObject
) -> None:
    """Any order finishes. Each tasklet is read, fetched, computed, and then written and delivered, once.

    Tasklets may be added while the batch runs. Resident ones run their own stages, outside the ring's buffers. Both
    kinds begin in list order.
    """
    simulation = Simulation(0, num_buffers, **stages)
    simulation.num_buffers *= 2
    ways: list[tuple[bool, bool, bool]] = []
    for number, resident, reads, writes in parts:
        ways += [(resident, reads, writes) if resident else (False, stages["reads"], stages["writes"])] * number
        if resident:
            extend_resident(simulation.schedule, number, reads=reads, writes=writes)
        else:
            simulation.schedule.extend(number)
        simulation.resident = {tasklet for tasklet, (is_resident, _, _) in enumerate(ways) if is_resident}
        for _ in range(data.draw(st.integers(0, 4))):
            simulation.start()
            if simulation.in_flight:
                simulation.end(data)
    simulation.run(data)
    for tasklet, (_, reads, writes) in enumerate(ways):
        before = ["read"] * reads + ["fetch"] * stages["fetches"] + ["compute"]
        after = ["write"] * writes + ["deliver"] * stages["delivers"]
        found = [action for action, of in simulation.ended if of == tasklet]
        assert found[: len(before)] == before and sorted(found[len(before) :]) == sorted(after)
        assert [action for action, of in simulation.started if of == tasklet][: len(before)] == before
    for kind in (True, False):
        begun = list(dict.fromkeys(of for _, of in simulation.started if ways[of][0] == kind))
        assert begun == sorted(begun)
    assert (simulation.in_flight, simulation.schedule.complete()) == ({}, [True] * len(ways))


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
        waiting = [tasklet for tasklet in waiting if tasklet not in simulation.begun("read")]
        preferred = data.draw(st.permutations(range(num_tasklets + resident)))[: data.draw(st.integers(0, 6))]
        simulation.schedule.prefer(preferred)
        waiting.sort(key=lambda tasklet: preferred.index(tasklet) if tasklet in preferred else len(preferred))
        if simulation.in_flight:
            simulation.end(data)
    before = len(simulation.begun("read"))
    simulation.run(data)
    assert simulation.begun("read")[before:] == waiting
    assert sorted(simulation.begun("compute")) == list(range(num_tasklets + resident))


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
    assert [index for index, complete in enumerate(simulation.schedule.complete()) if complete] == sorted(
        ({tasklet for action, tasklet in simulation.ended if action == "write"} & set(delivered)) - simulation.failed
    )
    assert simulation.start() == [] and simulation.schedule.finished


@given(num_tasklets=st.integers(3, 12), data=st.data())
def test_the_ring_is_used(num_tasklets: int, data: st.DataObject) -> None:
    """No buffer is idle while there are tasklets to read."""
    simulation = Simulation(num_tasklets, 3, reads=True, writes=True)
    simulation.start()
    while len(simulation.begun("read")) < num_tasklets:
        assert len(simulation.in_flight) == 3
        simulation.end(data)
        simulation.start()
