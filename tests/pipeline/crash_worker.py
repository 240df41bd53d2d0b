"""A training process that runs until it is killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.helpers.native_testing import inject
from tests.pipeline.harness import Case, Run
from tests.pipeline.wandering import wander

NUM_STEPS = 1_000


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
