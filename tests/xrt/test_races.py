"""Cards at random speeds, used in random orders, give the host's bits whatever comes first."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity.native import Batch, Operation
from tests.helpers.card_runs import cards, pipelines, same_as_host, settled_host
from tests.helpers.golden import STEPS_OF_RULES, random_arrays
from tests.helpers.native_testing import inject
from tests.helpers.runif import RunIf
from tests.native.stored import Array, Run
from tests.pipeline.harness import Case, running
from tests.pipeline.harness import Run as HandlerRun
from tests.xrt.card_state import CardCase, CardState, card_state
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

NUM_CARDS = 2
SEEDS = pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 1_000), marks=pytest.mark.long)], ids=["few", "many"]
)


def slow_down(random: np.random.Generator, cards: EmulatedCards) -> None:
    """Give each card's kernels and syncs a random time of their own, up to a millisecond, or none."""
    cards.reset()
    for card in range(NUM_CARDS):
        cards.set("latency_us", int(random.integers(0, 3)) * int(random.integers(0, 500)), card=card)
        cards.set("dma_mib_per_s", int(random.choice([0, 50, 500])), card=card)


class Racer:
    """A card's partition of a few elements, and what happens to it.

    Args:
        random: Decides everything.
        state: Of card and host.
        name: Of the rule.
        numel: Elements.
    """

    def __init__(self, random: np.random.Generator, state: CardState, name: str, numel: int) -> None:
        self._random = random
        self._state = state
        self._step: Any = STEPS_OF_RULES[name][0]
        self._gradient, *arrays = random_arrays(self._step, numel, int(random.integers(1000)), special=False)
        self._on_card, self._on_host = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        state.write(*arrays)
        self._tasklets: list[Any] = []
        self._num_begun = 0

    def _runs(self, parameter: Array) -> list[Run]:
        return [Run(0, parameter.size, 0, self._gradient, parameter=parameter)]

    @property
    def _order(self) -> list[int]:
        """Random positions of tasklets that have begun."""
        return [int(p) for p in self._random.permutation(self._num_begun)[: self._random.integers(1, 8)]]

    def begin(self) -> None:
        """Submit some of the tasklets, in any order, at places that nobody reads."""
        inject(self._state.pipeline, seed=int(self._random.integers(1 << 30)), max_delay_us=200, short_transfer_every=3)
        tasklets = self._state.stored.tasklets(self._runs(self._on_card))
        self._tasklets = [tasklets[index] for index in self._random.permutation(len(tasklets))]
        self._on_card[:] = 0
        self._num_begun = int(self._random.integers(1, len(tasklets) + 1))
        self._state.pipeline.submit(self._batch(0, self._num_begun))

    def go_on(self) -> None:
        """Do anything that may be done in a batch: extend it, change its order, or wait for a part."""
        pipeline = self._state.pipeline
        choice = self._random.integers(4)
        if choice == 0 and self._num_begun < len(self._tasklets):
            end = int(self._random.integers(self._num_begun, len(self._tasklets))) + 1
            pipeline.extend(self._batch(self._num_begun, end))
            self._num_begun = end
        elif choice == 1:
            pipeline.prefer(self._order)
        elif choice == 2:
            order = self._order
            assert pipeline.wait_for(order) is None
            self._check(order)
        else:
            pipeline.finished()

    def _check(self, positions: list[int]) -> None:
        """Assert that the parameters that were waited for are there."""
        for position in positions:
            tasklet = self._tasklets[position]
            assert self._on_card[tasklet.offset : tasklet.offset + tasklet.numel].all()

    def stop(self) -> None:
        """Abandon the batch, wherever it is; nothing of it counts."""
        self._state.pipeline.stop()

    def end(self) -> None:
        """Do the rest, and compare with the host."""
        if self._num_begun < len(self._tasklets):
            self._state.pipeline.extend(self._batch(self._num_begun, len(self._tasklets)))
        assert self._state.finish() is None
        assert self._state.host.work(Operation.UPDATE, self._runs(self._on_host), [self._step]) is None
        np.testing.assert_array_equal(self._on_card, self._on_host)
        self._state.assert_same()

    def _batch(self, first: int, last: int) -> Batch:
        return Batch(Operation.UPDATE, self._tasklets[first:last], [self._step])


@SEEDS
def test_pipelines_of_two_cards(tmp_path: Path, emulated_cards: EmulatedCards, seeds: range) -> None:
    """Batches on two cards may be extended, reordered, waited for in parts, abandoned and closed."""
    for seed in seeds:
        random = np.random.default_rng(seed)
        slow_down(random, emulated_cards)
        with ExitStack() as stack:
            racers = []
            for card in range(NUM_CARDS):
                name = str(random.choice([*STEPS_OF_RULES]))
                options: dict[str, Any] = {
                    "num_buffers": int(random.integers(1, 5)),
                    "compute_threads": int(random.integers(1, 4)),
                }
                numel, tasklet = int(random.integers(1, 400)), int(random.integers(5, 70))
                folder = tmp_path / f"{seed}-{card}"
                state = stack.enter_context(
                    card_state(
                        folder,
                        emulated_cards,
                        STEPS_OF_RULES[name][0],
                        numel,
                        CardCase(tasklet_numel=tasklet, card=card, **options),
                    )
                )
                racers.append(Racer(random, state, name, numel))
            for _ in range(2):
                race(random, racers)
            for racer in racers:  # closed in the middle of a batch
                racer.begin()


def race(random: np.random.Generator, racers: list[Racer]) -> None:
    """Run one step of each racer."""
    for racer in racers:
        racer.begin()
        if random.integers(3) == 0:
            racer.go_on()
            racer.stop()
            racer.begin()
    for _ in range(random.integers(12)):
        racers[random.integers(len(racers))].go_on()
    for racer in racers:
        racer.end()


CASE = Case(dtype=torch.bfloat16, num_devices=NUM_CARDS, num_buffers=2)
FAULTS = ("error", "abort", "submit", "sync")


@SEEDS
def test_steps_of_two_cards(tmp_path: Path, emulated_cards: EmulatedCards, seeds: range) -> None:
    """A handler's steps, whole or incremental, may be waited for in parts, rolled back and redone, with failures."""
    with (
        running(tmp_path / "card", CASE, device=cards(emulated_cards.build.xclbin)) as run,
        running(tmp_path / "host", CASE, device=settled_host) as host,
    ):
        for seed in seeds:
            random = np.random.default_rng(seed)
            slow_down(random, emulated_cards)
            for pipeline in pipelines(run):
                inject(pipeline, seed=seed, max_delay_us=300, short_transfer_every=5)
            if random.integers(4) == 0:
                emulated_cards.inject(
                    str(random.choice(FAULTS)), card=int(random.integers(NUM_CARDS)), skipped=int(random.integers(3))
                )
            before = torch.cat(run.partition).clone()
            host.step(seed)
            for _ in range(random.integers(3)):
                begin(random, run, host, seed)
                run.handler.roll_back()
                assert torch.equal(torch.cat(run.partition), before)
            begin(random, run, host, seed)
            run.handler.commit()
            same_as_host(run, host)


def begin(random: np.random.Generator, run: HandlerRun, host: HandlerRun, number: int) -> None:
    """Begin a step, and assert that the parameters that were waited for are those that the host has already."""
    plan = replace(run.collect(number), first_uses=random.permutation(len(CASE.shapes)))
    if random.integers(2):
        run.handler.begin_step(plan)
    else:
        grow(random, run, plan)
    for _ in range(random.integers(4)):
        parameter = int(random.integers(len(CASE.shapes)))
        run.handler.step.wait([parameter])
        assert torch.equal(run.slice(parameter), host.slice(parameter))


def grow(random: np.random.Generator, run: HandlerRun, plan: Any) -> None:
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
