"""Cards at random speeds, used in random orders, give the host's bits whatever comes first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.card_runs import OPTIMIZERS, cards, pipelines, same_as_host, settled_host
from tests.helpers.native_testing import inject
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Case, Run, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

NUM_CARDS = 2
FAULTS = ("error", "abort", "submit", "sync")


def slow_down(random: np.random.Generator, emulated_cards: EmulatedCards) -> None:
    """Give each card's kernels and syncs a random time of their own, up to a millisecond, or none."""
    emulated_cards.reset()
    for card in range(NUM_CARDS):
        emulated_cards.set("latency_us", int(random.integers(0, 3)) * int(random.integers(0, 500)), card=card)
        emulated_cards.set("dma_mib_per_s", int(random.choice([0, 50, 500])), card=card)


def case_of(random: np.random.Generator) -> Case:
    """Return any optimizer, with many tasklets or few, in rings of any number of buffers."""
    return Case(
        dtype=torch.bfloat16,
        num_devices=NUM_CARDS,
        num_buffers=int(random.integers(2, 6)),
        tasklet_bytes=int(random.choice([64, 128])) << 10,
        **OPTIMIZERS[str(random.choice([*OPTIMIZERS]))],
    )


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 1_000), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_steps_of_two_cards(tmp_path: Path, emulated_cards: EmulatedCards, seeds: range) -> None:
    """A handler's steps, whole or incremental, may be waited for in parts, rolled back and redone, with failures.

    Requests come back in any order. A run may be closed in the middle of a step.
    """
    for seed in seeds:
        random = np.random.default_rng(seed)
        case, folder = case_of(random), tmp_path / str(seed)
        with (
            running(folder / "card", case, device=cards(emulated_cards.build.xclbin)) as run,
            running(folder / "host", case, device=settled_host) as host,
        ):
            for step in range(2):
                race(random, run, host, emulated_cards, step)
                same_as_host(run, host)
            run.handler.begin_step(run.collect(2))


def race(random: np.random.Generator, run: Run, host: Run, emulated_cards: EmulatedCards, step: int) -> None:
    """Run one step, with cards of another speed, a failure at times, and up to two rollbacks."""
    slow_down(random, emulated_cards)
    for pipeline in pipelines(run):
        inject(pipeline, seed=int(random.integers(1 << 30)), max_delay_us=300, short_transfer_every=5)
    for card in range(NUM_CARDS):
        if random.integers(4) == 0:
            emulated_cards.inject(str(random.choice(FAULTS)), card=card, skipped=int(random.integers(3)))
    before = torch.cat(run.partition).clone()
    host.step(step)
    for _ in range(random.integers(3)):
        begin(random, run, host, step)
        run.handler.roll_back()
        assert torch.equal(torch.cat(run.partition), before)
    begin(random, run, host, step)
    run.handler.commit()


def begin(random: np.random.Generator, run: Run, host: Run, number: int) -> None:
    """Begin a step, and assert that the parameters that were waited for are those that the host has already."""
    num_parameters = len(run.case.shapes)
    plan = replace(run.collect(number), first_uses=random.permutation(num_parameters))
    if random.integers(2):
        run.handler.begin_step(plan)
    else:
        grow(random, run, plan)
    for _ in range(random.integers(4)):
        parameter = int(random.integers(num_parameters))
        run.handler.step.wait([parameter])
        assert torch.equal(run.slice(parameter), host.slice(parameter))


def grow(random: np.random.Generator, run: Run, plan: Any) -> None:
    """Begin an incremental step, whose first tasklets begin before it is known what else belongs to it."""
    run.handler.begin_incremental(replace(plan, active=np.ones_like(plan.active)))
    missing = {
        tasklet
        for parameter in np.flatnonzero(~plan.active)
        for tasklet in run.layout.tasklets_of(slice(parameter, parameter + 1))
    }
    complete = [tasklet for tasklet in range(len(run.layout.tasklets)) if tasklet not in missing]
    for index in random.permutation(complete)[: random.integers(len(complete) + 1)]:
        run.handler.step.extend([int(index)])
    assert run.handler.step.complete(plan)
