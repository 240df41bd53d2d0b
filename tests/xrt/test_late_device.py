"""Many late requests of each kind, and many failed allocations, still give the host's bits.

They are a hundred of each with ``--long``, and otherwise twenty.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import DeviceError
from lightning_smartinfinity.devices.smartssd import worker as worker_module
from tests.helpers.card_runs import beside_host, cards, pipelines
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


def await_cards(run: Run) -> None:
    await_that(lambda: not any(pipeline.busy for pipeline in pipelines(run)))


class Late:
    """One request in each step, of a kind, that does not return before it is released."""

    def __init__(self, kind: str, cards: EmulatedCards) -> None:
        self.kind, self.cards, self.choose = kind, cards, random.Random(0)

    def begin(self, run: Run) -> None:
        """Prepare a late request before the step begins."""
        self._before = len(self.cards.events("sync-stalled"))
        card = self.choose.randrange(2)
        if self.kind == "sync":
            self.cards.inject("stall", card=card, skipped=self.choose.randrange(3))
        else:
            where = {f"{self.kind}_at": self.choose.randrange(2)}  # of state or of a trailer
            self._hold = Hold(pipelines(run)[card], **where)

    def end(self) -> bool:
        """Let the late request return, and return whether there was one."""
        if self.kind == "sync":
            self.cards.release()
            return len(self.cards.events("sync-stalled")) > self._before
        held = self._hold.count
        self._hold.release()
        return held == 1


Fail = Callable[[str, Callable[[Run, int, Late], bool]], None]


@pytest.fixture
def fail(request: pytest.FixtureRequest, tmp_path: Path, emulated_cards: EmulatedCards) -> Fail:
    """Return a function that runs steps until many requests of a kind were late, and compares with the host."""
    most = NUM_FAILURES if request.config.getoption("long") else 20
    settings = {"timeout": lenient(SHORT, pauses=5), "gradient_route": request.param}

    def until_done(kind: str, work: Callable[[Run, int, Late], bool]) -> None:
        late, num_failures = Late(kind, emulated_cards), 0
        with beside_host(tmp_path, CASE, emulated_cards.build.xclbin, **settings) as (run, host):
            for step in range(MOST_STEPS):
                await_cards(run)
                late.begin(run)
                num_failures += work(run, step, late)
                host.step(step)
                if num_failures == most:
                    break
            await_cards(run)
        assert num_failures == most

    return until_done


@pytest.mark.parametrize(
    ("fail", "kind"),
    long_but([("storage", "read")], itertools.product(ROUTES, ["sync", "read"])),
    indirect=["fail"],
)
def test_many_that_the_host_takes_over(fail: Fail, kind: str) -> None:
    """The host takes over for a late sync or read, and the card works again once the request has returned."""

    def work(run: Run, step: int, late: Late) -> bool:
        run.step(step)
        return late.end()

    fail(kind, work)


@pytest.mark.parametrize("fail", long_but(["storage"], ROUTES), indirect=True)
def test_many_writes_that_an_ssd_recovers(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each late write is waited for; then the host takes over."""

    def work(run: Run, step: int, late: Late) -> bool:
        returned = []
        with monkeypatch.context() as patched:
            patched.setattr(worker_module.time, "sleep", lambda _: returned.append(late.end()))
            run.step(step)
        late.end()
        return any(returned)

    fail("write", work)


@pytest.mark.parametrize("fail", long_but(["host"], ROUTES), indirect=True)
def test_many_writes_that_do_not_return(fail: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each late write ends its step, which is rolled back and redone once the write has returned."""
    monkeypatch.setattr(worker_module, "_RECOVERY", 0.0)

    def work(run: Run, step: int, late: Late) -> bool:
        happened = False
        for _ in range(MOST_STEPS):
            try:
                run.step(step)
                break
            except DeviceError:
                run.handler.roll_back()
                happened |= late.end()
                await_cards(run)
        late.end()
        return happened

    fail("write", work)


@pytest.mark.long
@pytest.mark.parametrize("route", ROUTES)
def test_many_allocations_that_fail(tmp_path: Path, emulated_cards: EmulatedCards, route: str) -> None:
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
    with beside_host(tmp_path, CASE, emulated_cards.build.xclbin, gradient_route=route) as runs:
        for each in runs:
            each.steps(range(3))
