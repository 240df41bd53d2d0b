"""Fits a LitRandom in processes of their own: ``python -m tests.training.random_worker JOBS.json``."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.processes import run_module
from tests.helpers.random_fit import LitRandom, SaveAt, seed
from tests.helpers.trainers import quiet_trainer


@dataclass(frozen=True)
class Job:
    """A fit whose ranks write their losses and warnings to ``out``, next to the checkpoints named in ``save``."""

    out: str
    seed: int
    devices: int = 1
    save: tuple[str, ...] = ()
    resume: str | None = None
    module: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Left:
    """The losses and warnings of one rank of a job."""

    losses: list[float]
    warnings: list[str]


def run(job: Job) -> Left:
    """Run the fit in this process and those that Lightning launches."""
    out = Path(job.out)
    seed(job.seed)
    module = LitRandom(**job.module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(
            out,
            precision="32-true",
            max_epochs=3,
            devices=job.devices,
            callbacks=[SaveAt(out, *job.save)],
            **job.options,
        )
        trainer.fit(module, ckpt_path=job.resume)
    left = Left([loss for *_, loss in module.losses], [str(w.message) for w in caught])
    out.mkdir(parents=True, exist_ok=True)
    (out / f"left-{trainer.global_rank}.json").write_text(json.dumps(dataclasses.asdict(left)))
    return left


def launch(*jobs: Job) -> list[list[Left]]:
    """Run jobs in turn in fresh processes and return each rank's result.

    All jobs must use the same number of devices.
    """
    assert len({job.devices for job in jobs}) == 1
    config = Path(jobs[0].out) / "jobs.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    done = run_module("tests.training.random_worker", config, ranks=jobs[0].devices)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [[_left(job, rank) for rank in range(job.devices)] for job in jobs]


def _left(job: Job, rank: int) -> Left:
    return Left(**json.loads((Path(job.out) / f"left-{rank}.json").read_text()))


if __name__ == "__main__":
    for raw in json.loads(Path(sys.argv[1]).read_text()):
        run(Job(**raw))
