"""Trains by transformers' Trainer until it is interrupted: ``python -m tests.huggingface.interrupted RUN.json``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.trainer_callback import ExportableState

from tests.helpers.processes import run_module
from tests.huggingface.trained import dataset, train

MODULE = "tests.huggingface.interrupted"


@dataclass(frozen=True)
class HuggingRun:
    """A training of two epochs of five steps with two micro-batches each, and how it is interrupted.

    Args:
        out: Folder of the run.
        model: Folder of the model.
        resume: ``resume_from_checkpoint``.
        how: ``"kill"`` or ``"interrupt"``; empty: nothing interrupts it.
        method: Method of the Trainer that is interrupted when it is called.
        step: Number of steps before that.
        changes: Further ``TrainingArguments``.
        strategy: Settings of SmartInfinityTraining.
    """

    out: str
    model: str
    resume: str | bool | None = None
    how: str = ""
    method: str = ""
    step: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)


@dataclass
class Left:
    """What a training leaves.

    Args:
        logs: The numbers logged at each step: losses, norms, rates and results of evaluations.
        end: The weights' digest, the Trainer's state, the next random numbers, and the callback's counts.
        out: Folder of the run.
    """

    logs: list[list[Any]]
    end: list[Any]
    out: str


class Noisy(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of which some tokens are drawn from the three global generators, but in workers."""

    def __init__(self) -> None:
        self.rows = dataset(10)

    def __len__(self) -> int:
        return len(self.rows) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]["input_ids"].clone()
        if torch.utils.data.get_worker_info() is None:
            row[:3] = torch.tensor([int(torch.randint(300, ())), np.random.randint(300), random.randrange(300)])
        return {"input_ids": row, "labels": row}


class Counting(transformers.TrainerCallback, ExportableState):
    """Counts steps and evaluations in its state."""

    def __init__(self) -> None:
        self.steps = self.evaluations = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.evaluations += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps, "evaluations": self.evaluations}}


class CountingNow(Counting):
    """Has no saved state."""


def dropping(model: Any) -> Any:
    """Return the model with dropout."""
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return model


@contextmanager
def interrupted(run: HuggingRun) -> Iterator[None]:
    """Interrupt the training where the run asks for it."""
    if not run.how:
        yield
        return
    original = getattr(transformers.Trainer, run.method)

    def dying(trainer: transformers.Trainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == run.step:
            if run.how == "interrupt":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM if run.how == "term" else signal.SIGKILL)
        return original(trainer, *args, **kwargs)

    with mock.patch.object(transformers.Trainer, run.method, dying):
        yield


def train_interrupted(run: HuggingRun) -> Left:
    """Train as the run says."""
    counting, logs = Counting(), list[list[Any]]()

    def watch(trainer: Any) -> None:
        if run.resume == "storage":  # a callback that the interrupted training did not have
            trainer.add_callback(CountingNow())
        trainer.add_callback(counting)
        log = trainer.log

        def noted(values: dict[str, float], *args: Any) -> None:
            if "train_loss" not in values:
                told = {key: value for key, value in values.items() if not key.endswith(("_runtime", "_per_second"))}
                logs.append([trainer.state.global_step, told])
            log(values, *args)

        trainer.log = noted

    settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "train_sampling_strategy": "random"}
    settings |= {
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_total_limit": 1,
    }
    with interrupted(run):
        left = train(
            Path(run.model),
            Path(run.out),
            wrap=dropping,
            before=watch,
            resume=run.resume,
            data=Noisy(),  # type: ignore[arg-type]
            strategy=run.strategy,
            **settings | run.changes,
        )
    digest = hashlib.sha256(b"".join(values.numpy().tobytes() for values in left.weights.values())).hexdigest()
    state = left.trainer.state
    numbers = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    counts = [counting.steps, counting.evaluations]
    return Left(logs, [digest, state.global_step, state.epoch, state.total_flos, *numbers, counts], run.out)


def launch(run: HuggingRun) -> int:
    """Train in a forked process, and return its exit status."""
    path = Path(run.out) / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(run)))
    return run_module(MODULE, path).returncode


if __name__ == "__main__":
    this = HuggingRun(**json.loads(Path(sys.argv[1]).read_text()))
    ended = train_interrupted(this)
    Path(this.out, f"left-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(dataclasses.asdict(ended)))
