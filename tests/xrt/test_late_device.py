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
KINDS = ("sync", "read", "write that an SSD recovers", "write")


def await_cards(run: Run) -> None:
    await_that(lambda: not any(pipeline.busy for pipeline in pipelines(run)))


def begin(kind: str, run: Run, emulated_cards: EmulatedCards, choose: random.Random) -> Callable[[], bool]:
    """Prepare a late request; return the function that lets it return, and returns whether there was one."""
    card = choose.randrange(2)
    if kind == "sync":
        before = len(emulated_cards.events("sync-stalled"))
        emulated_cards.inject("stall", card=card, skipped=choose.randrange(3))

        def release() -> bool:
            emulated_cards.release()
            return len(emulated_cards.events("sync-stalled")) > before

        return release
    hold = Hold(pipelines(run)[card], **{f"{kind.split()[0]}_at": choose.randrange(2)})  # of state or of a trailer

    def release_hold() -> bool:
        held = hold.count
        hold.release()
        return held == 1

    return release_hold


@pytest.mark.parametrize(
    ("route", "kind"),
    long_but(
        [("storage", "read"), ("storage", "write that an SSD recovers"), ("host", "write")],
        itertools.product(ROUTES, KINDS),
    ),
)
def test_many_late_requests(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    route: str,
    kind: str,
) -> None:
    """The host takes over for a late sync or read, and for a late write that returns while it is waited for.

    Another late write ends its step, which is rolled back and redone. The card works again afterwards.
    """
    monkeypatch.setattr(worker_module, "_MOST_FAILURES", 10 * MOST_STEPS)
    if kind == "write":
        monkeypatch.setattr(worker_module, "_RECOVERY", 0.0)
    most, num_failures = NUM_FAILURES if request.config.getoption("long") else 20, 0
    settings, choose = {"timeout": lenient(SHORT, pauses=5), "gradient_route": route}, random.Random(0)
    with beside_host(tmp_path, CASE, emulated_cards.build.xclbin, **settings) as (run, host):
        for step in range(MOST_STEPS):
            await_cards(run)
            release, late = begin(kind, run, emulated_cards, choose), list[bool]()
            with monkeypatch.context() as patched:
                if kind == "write that an SSD recovers":
                    patched.setattr(
                        worker_module.time, "sleep", lambda _, late=late, release=release: late.append(release())
                    )
                while run.handler.generation == step:
                    try:
                        run.step(step)
                    except DeviceError:
                        assert kind == "write"
                        run.handler.roll_back()
                        late.append(release())
                        await_cards(run)
            late.append(release() and "write" not in kind)
            num_failures += any(late)
            host.step(step)
            if num_failures == most:
                break
        await_cards(run)
    assert num_failures == most


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
