"""A process killed at any moment of a step leaves a whole generation behind."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.errors import StorageCorruptError
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject
from tests.helpers.waiting import LIMIT
from tests.pipeline.harness import Case, Run, assert_equal, running, stored
from tests.pipeline.wandering import wander

LAST_STEP = 6
NUM_STEPS = 1_000  # of a process that runs until it is killed


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    """Let the fork server import torch once, instead of each process."""
    multiprocessing.set_forkserver_preload(["torch._dynamo", "tests.pipeline.test_crash"])


def train(folder: Path, case: Case, seed: int, begun: Connection) -> None:
    """Train with random delays and moving tasklets, and send the number of every step once it has begun."""
    torch.set_num_threads(1)
    run = Run(folder, case)
    wander(run, seed=seed)
    inject(run.device.pipeline, seed=seed, max_delay_us=2_000, short_transfer_every=11)
    for number in range(NUM_STEPS):
        run.handler.begin_step(run.collect(number))
        begun.send(number)
        run.handler.commit()


def kill_while_training(folder: Path, case: Case, seed: int) -> None:
    """Kill a training process up to a few milliseconds after a random step has begun."""
    generator = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(folder, case, seed, sender), daemon=True)
    process.start()
    sender.close()
    last = generator.randrange(LAST_STEP)
    reached = -1
    while reached < last:
        assert receiver.poll(2 * LIMIT), f"no step after {reached}"  # the first one follows the server's imports
        reached = receiver.recv()
    time.sleep(generator.uniform(0, 0.02))
    process.kill()
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL


def generations(folder: Path, case: Case, count: int) -> list[dict[str, torch.Tensor]]:
    with running(folder, case) as run:
        states = [stored(run)]
        for number in range(count):
            run.step(number)
            states.append(stored(run))
    return states


CASES = {
    "fp32 in two folders": Case(num_devices=2),
    "bf16 parameters": Case(dtype=torch.bfloat16),
    "bf16, some in memory": Case(state_format="bf16", cache_bytes=200_000),
    "int8": Case(state_format="int8", dtype=torch.float16),
    "int8_remainder, all in memory": Case(state_format="int8_remainder", dtype=torch.bfloat16, cache_bytes=1 << 30),
}
USUAL = ("fp32 in two folders", "bf16 parameters", "int8_remainder, all in memory")


@pytest.mark.parametrize("name", long_but(USUAL, CASES))
def test_killed_in_the_middle_of_a_step(tmp_path: Path, name: str, attack: Attack) -> None:
    """Recovery finds a committed generation bit for bit, and training continues from it."""
    attack("kill within a step", tries=6, outcome="the state of a committed step is whole")
    case, found = CASES[name], []
    for seed in range(6):
        folder = tmp_path / str(seed)
        kill_while_training(folder, case, seed)
        with running(folder, case, recover=True) as run:
            generation, before = run.handler.generation, stored(run)
            assert generation < NUM_STEPS
            run.set_partition([arrays[0] for arrays in run.read()])
            run.step(generation)
            found.append((generation, before, stored(run)))
    expected = generations(tmp_path / "undisturbed", case, 1 + max(generation for generation, *_ in found))
    for generation, before, after in found:
        assert_equal(before, expected[generation])
        assert_equal(after, expected[generation + 1])
    assert len({generation for generation, *_ in found}) > 1


def test_killed_without_durability(tmp_path: Path) -> None:
    """With one place, recovery finds a whole generation or refuses, never a mixture."""
    case, found = Case(durability="none", num_devices=2), []
    for seed in range(4):
        folder = tmp_path / str(seed)
        kill_while_training(folder, case, seed)
        with suppress(StorageCorruptError), running(folder, case, recover=True) as run:
            found.append((run.handler.generation, stored(run)))
    expected = generations(tmp_path / "undisturbed", case, max((generation for generation, _ in found), default=0))
    for generation, state in found:
        assert_equal(state, expected[generation])
