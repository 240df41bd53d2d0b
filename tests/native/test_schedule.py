"""The order of a batch under any interleaving of completions."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import TransferSchedule

sizes = st.integers(0, 12)
buffers = st.integers(1, 5)


class Simulation:
    """Starts what the schedule wants started, and ends actions in an order that hypothesis chooses."""

    def __init__(self, num_tasklets: int, num_buffers: int, *, reads: bool, writes: bool) -> None:
        self.num_buffers = num_buffers
        self.schedule = TransferSchedule(num_tasklets, num_buffers, reads=reads, writes=writes)
        self.in_flight: dict[int, tuple[str, int]] = {}
        self.started: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []

    def start(self) -> list[str]:
        actions = self.schedule.next()
        for action, tasklet, buffer in actions:
            assert buffer not in self.in_flight, "a buffer holds one tasklet at a time"
            assert 0 <= buffer < self.num_buffers
            self.in_flight[buffer] = (action, tasklet)
            self.started.append((action, tasklet))
        assert self.schedule.next() == []
        return [action for action, _, _ in actions]

    def end(self, data: st.DataObject, *, fail: bool = False) -> None:
        buffer = data.draw(st.sampled_from(sorted(self.in_flight)))
        action, tasklet = self.in_flight.pop(buffer)
        self.ended.append((action, tasklet))
        if fail:
            self.schedule.fail(tasklet)
        else:
            self.schedule.done(action, tasklet)

    def run(self, data: st.DataObject) -> None:
        self.start()
        while not self.schedule.finished:
            self.end(data)
            self.start()


@given(num_tasklets=sizes, num_buffers=buffers, reads=st.booleans(), writes=st.booleans(), data=st.data())
def test_every_tasklet_once(
    num_tasklets: int, num_buffers: int, reads: bool, writes: bool, data: st.DataObject
) -> None:
    """Any interleaving finishes; each tasklet is read, computed and written once, in this order."""
    simulation = Simulation(num_tasklets, num_buffers, reads=reads, writes=writes)
    simulation.run(data)
    stages = ["read"] * reads + ["compute"] + ["write"] * writes
    expected = {(stage, tasklet): 1 for stage in stages for tasklet in range(num_tasklets)}
    assert Counter(simulation.started) == expected
    for tasklet in range(num_tasklets):
        assert [action for action, of in simulation.started if of == tasklet] == stages
        for before, after in itertools.pairwise(stages):
            ended = simulation.ended.index((before, tasklet))
            assert ended < simulation.ended.index((after, tasklet))
    assert simulation.in_flight == {}


@given(num_tasklets=sizes, num_buffers=buffers, data=st.data())
def test_order(num_tasklets: int, num_buffers: int, data: st.DataObject) -> None:
    """Writes start before reads that become possible with them, and tasklets are read in list order."""
    simulation = Simulation(num_tasklets, num_buffers, reads=True, writes=True)
    preference = {"write": 0, "compute": 1, "read": 2}
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
    """Neither earlier nor later, and before the tasklet's write starts."""
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
def test_failure_drains(num_tasklets: int, num_buffers: int, data: st.DataObject) -> None:
    """After a failure at any time nothing starts, what is in flight ends, and then the batch is finished."""
    simulation = Simulation(num_tasklets, num_buffers, reads=True, writes=True)
    simulation.start()
    for _ in range(data.draw(st.integers(0, 3 * num_tasklets - 1))):
        simulation.end(data)
        simulation.start()
    simulation.end(data, fail=True)
    while simulation.in_flight:
        assert not simulation.schedule.finished
        assert simulation.start() == []
        simulation.end(data, fail=data.draw(st.booleans()))
    assert simulation.start() == []
    assert simulation.schedule.finished


@given(num_tasklets=st.integers(3, 12), data=st.data())
def test_the_ring_is_used(num_tasklets: int, data: st.DataObject) -> None:
    """As long as there are tasklets to read, no buffer is idle."""
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
    """It cannot end."""
    schedule = TransferSchedule(2, 1, reads=True, writes=True)
    assert schedule.next() == [("read", 0, 0)]
    with pytest.raises(ValueError, match=f"tasklet {tasklet}"):
        schedule.done(action, tasklet)


def test_bad_arguments() -> None:
    """A ring has a buffer; an action has a name; a tasklet is one of the batch."""
    with pytest.raises(ValueError, match="num_buffers"):
        TransferSchedule(1, 0, reads=True, writes=True)
    schedule = TransferSchedule(1, 1, reads=True, writes=True)
    with pytest.raises(ValueError, match="unknown action erase"):
        schedule.done("erase", 0)
    with pytest.raises(IndexError):
        schedule.parameters_out(1)
