"""A hundred late requests of each kind, and a hundred failed allocations, still give the host's bits."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import DeviceError
from lightning_smartinfinity.devices.smartssd import SmartSSDDevice
from lightning_smartinfinity.devices.smartssd import worker as worker_module
from lightning_smartinfinity.native import Pipeline
from tests.helpers.card_runs import cards, same_as_host, settled_host
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import Hold
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that, lenient
from tests.pipeline.harness import Case, Run, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

NUM_FAILURES = 100
MOST_STEPS = 3 * NUM_FAILURES  # a machine under load may be late with something else first
CASE = Case(dtype=torch.bfloat16, num_devices=2, shapes=((3_000, 0, 0, 0), (2_000, 3, 1, 0), (2_500, 0, 0, 1)))
SHORT = 0.01
ROUTES = ("host", "storage")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up no card for several failures in a row."""
    monkeypatch.setattr(worker_module, "_MOST_FAILURES", 10 * MOST_STEPS)


def pipelines(run: Run) -> list[Pipeline]:
    assert isinstance(run.device, SmartSSDDevice)
    return [worker.pipeline for worker in run.device._workers]


def await_cards(run: Run) -> None:
    await_that(lambda: not any(pipeline.busy for pipeline in pipelines(run)))


@dataclass
class Late(ABC):
    """One request in each step that does not return before it is released."""

    cards: EmulatedCards
    choose: random.Random = field(default_factory=lambda: random.Random(0))

    @abstractmethod
    def begin(self, run: Run) -> None:
        """Prepare a late request before the step begins."""

    @abstractmethod
    def end(self) -> bool:
        """Let the late request return, and return whether there was one."""


class LateSync(Late):
    def begin(self, run: Run) -> None:
        self._before = len(self.cards.events("sync-stalled"))
        self.cards.inject("stall", card=self.choose.randrange(2), skipped=self.choose.randrange(3))

    def end(self) -> bool:
        self.cards.release()
        return len(self.cards.events("sync-stalled")) > self._before


class LateRead(Late):
    direction = "read_at"

    def begin(self, run: Run) -> None:
        where = {self.direction: self.choose.randrange(2)}  # of state or of a trailer
        self._hold = Hold(pipelines(run)[self.choose.randrange(2)], **where)

    def end(self) -> bool:
        held = self._hold.count
        self._hold.release()
        return held == 1


class LateWrite(LateRead):
    direction = "write_at"


@dataclass
class Both:
    """The same training on cards and on the host."""

    run: Run
    host: Run

    def fail(self, late: Late, work: Callable[[int, Late], bool]) -> None:
        """Run steps until a hundred requests were late, and compare with the host."""
        num_failures = 0
        for step in range(MOST_STEPS):
            await_cards(self.run)
            late.begin(self.run)
            num_failures += work(step, late)
            self.host.step(step)
            if num_failures == NUM_FAILURES:
                break
        assert num_failures == NUM_FAILURES
        await_cards(self.run)
        same_as_host(self.run, self.host)


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path, emulated_cards: EmulatedCards) -> Iterator[Both]:
    device = cards(emulated_cards.build.xclbin, timeout=lenient(SHORT, pauses=5), gradient_route=request.param)
    with (
        running(tmp_path / "card", CASE, device=device) as run,
        running(tmp_path / "host", CASE, device=settled_host) as host,
    ):
        yield Both(run, host)


@pytest.mark.parametrize(
    ("both", "kind"),
    long_but([("storage", LateRead)], itertools.product(ROUTES, [LateSync, LateRead])),
    indirect=["both"],
)
def test_a_hundred_that_the_host_takes_over(both: Both, emulated_cards: EmulatedCards, kind: type[Late]) -> None:
    """The host takes over for a late sync or read, and the card works again once the request has returned."""

    def work(step: int, late: Late) -> bool:
        both.run.step(step)
        return late.end()

    both.fail(kind(emulated_cards), work)


@pytest.mark.parametrize("both", long_but(["storage"], ROUTES), indirect=True)
def test_a_hundred_writes_that_an_ssd_recovers(
    both: Both, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each late write is waited for; then the host takes over."""

    def work(step: int, late: Late) -> bool:
        returned = []
        with monkeypatch.context() as patched:
            patched.setattr(worker_module.time, "sleep", lambda _: returned.append(late.end()))
            both.run.step(step)
        late.end()
        return any(returned)

    both.fail(LateWrite(emulated_cards), work)


@pytest.mark.parametrize("both", long_but(["host"], ROUTES), indirect=True)
def test_a_hundred_writes_that_do_not_return(
    both: Both, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each late write ends its step, which is rolled back and redone once the write has returned."""
    monkeypatch.setattr(worker_module, "_RECOVERY", 0.0)

    def work(step: int, late: Late) -> bool:
        happened = False
        for _ in range(MOST_STEPS):
            try:
                both.run.step(step)
                break
            except DeviceError:
                both.run.handler.roll_back()
                happened |= late.end()
                await_cards(both.run)
        late.end()
        return happened

    both.fail(LateWrite(emulated_cards), work)


@pytest.mark.long
@pytest.mark.parametrize("route", ROUTES)
def test_a_hundred_allocations_that_fail(tmp_path: Path, emulated_cards: EmulatedCards, route: str) -> None:
    """A failed allocation stops the training and leaves nothing allocated; a new one then gives the host's bits."""
    device = cards(emulated_cards.build.xclbin, gradient_route=route)
    before = [emulated_cards.counter("num_buffers", card) for card in range(2)]
    with running(tmp_path / "card", CASE, device=device):
        num_allocations = emulated_cards.counter("num_buffers", 0) - before[0]
    for number in range(NUM_FAILURES):
        emulated_cards.inject("alloc", card=number % 2, skipped=number // 2 % num_allocations)
        with pytest.raises(DeviceError, match=rf"emulated card {number % 2}: .*is unavailable: xrtBOAlloc"):
            Run(tmp_path / "card", CASE, device=device)
        assert [emulated_cards.counter("num_buffers", card) for card in range(2)] == before
    with (
        running(tmp_path / "card", CASE, device=device) as run,
        running(tmp_path / "host", CASE, device=settled_host) as host,
    ):
        for each in (run, host):
            each.steps(range(3))
        same_as_host(run, host)
