"""Measures what the Trainer's record, from which an interrupted fit resumes, adds to a step of GPT-2 in bf16.

A record is written at the end of each batch. transformers' Trainer trains in fp32 here, as if it had logged 10,000
steps before. The table shows seconds of a step, from the end of one record to that of the next, milliseconds of the
records (median, 95th percentile, largest), their share of the steps, and their bytes.
Each training is a process of its own. Usage::

    python benchmarks/training_record.py [--size 124m] [--tokens 32] [--steps 42] [--storage .] [--json figures.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from comparison import Figures, compare, parse_options, several
from machine import describe
from training import WARMUP, Probe, tokens, train_with_package

SYSTEMS: dict[str, dict[str, Any]] = {
    "overlap none": {"overlap": "none"},
    "overlap forward": {"overlap": "forward"},
    "overlap backward": {"overlap": "backward"},
    "int8, overlap forward": {"overlap": "forward", "state_format": "int8"},
    "TopK 1 %, overlap forward": {"overlap": "forward", "compression": 0.01},
    "transformers, overlap forward": {"overlap": "forward"},
}
LOGGED_STEPS = 10_000
COLUMNS = {
    "step s": ("step", 3),
    "record ms": ("median", 2),
    "95 %, ms": ("most", 2),
    "largest ms": ("largest", 2),
    "share of the step, %": ("share", 2),
    "bytes": ("bytes", 0),
}


class Records:
    """The times and sizes of records.

    Args:
        kind: Class whose method writes a record.
        method: The method's name.
        storage: Folder below which records are stored.
    """

    def __init__(self, kind: type, method: str, storage: str) -> None:
        write, self.seconds, self.ends = getattr(kind, method), list[float](), list[float]()
        self.nbytes = 0

        def timed(*args: Any, **kwargs: Any) -> None:
            begin = time.perf_counter()
            write(*args, **kwargs)
            self.ends.append(time.perf_counter())
            self.seconds.append(self.ends[-1] - begin)
            self.nbytes = max(path.stat().st_size for path in Path(storage).rglob("training-*.bin"))

        setattr(kind, method, timed)

    def figures(self) -> Figures:
        """Return the values of the table, without the first steps."""
        steps = [b - a for a, b in pairwise(self.ends)][WARMUP:]
        records = self.seconds[1 + WARMUP :]  # the first one is that of the fit's beginning
        return {
            "step": statistics.median(steps),
            "median": 1e3 * statistics.median(records),
            "most": 1e3 * sorted(records)[-(-95 * len(records) // 100) - 1],
            "largest": 1e3 * max(records),
            "share": 100 * sum(records) / sum(steps),
            "bytes": self.nbytes,
        }


def run(options: argparse.Namespace) -> Figures:
    """Train in this process, and time each record."""
    settings = dict(SYSTEMS[options.child])
    if options.child.startswith("transformers"):
        return run_transformers(options, settings)
    from lightning_smartinfinity import TopK
    from lightning_smartinfinity.integrations.trainer.fit_record import TrainerFitRecord

    if "compression" in settings:
        settings["compression"] = TopK(settings["compression"])
    records = Records(TrainerFitRecord, "_record_loop", options.storage)
    train_with_package(
        options.size,
        options.steps,
        options.storage,
        accelerator="cpu",
        probe=Probe(),
        batches=partial(tokens, size=options.size, shape=(1, options.tokens)),
        settings=settings,
    )
    return records.figures()


def run_transformers(options: argparse.Namespace, settings: dict[str, Any]) -> Figures:
    """Train by transformers' Trainer, as if it had logged many steps before, and time each record."""
    import torch
    from gpt2 import GPT2
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lightning_smartinfinity.huggingface import SmartInfinityTraining
    from lightning_smartinfinity.integrations.transformers.fit_record import RecordedTraining

    class Model(torch.nn.Module):
        """GPT-2 that transformers can train."""

        def __init__(self) -> None:
            super().__init__()
            self.gpt2 = GPT2(options.size)

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.gpt2(input_ids)}

    class Logged(TrainerCallback):
        """Adds the logs of many steps."""

        def on_train_begin(self, args: object, state: Any, control: object, **_: object) -> None:
            state.log_history += [{"loss": 1.0, "learning_rate": 1e-4, "step": step} for step in range(LOGGED_STEPS)]

    records = Records(RecordedTraining, "_write", options.storage)
    batches = [
        {"input_ids": tokens(step, size=options.size, shape=(1, options.tokens))[0]} for step in range(options.steps)
    ]
    with SmartInfinityTraining(options.storage, **settings) as training:
        arguments = TrainingArguments(
            str(Path(options.storage, "transformers")),
            per_device_train_batch_size=1,
            max_steps=options.steps,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            deepspeed=training.config,
        )
        Trainer(Model(), arguments, train_dataset=batches, callbacks=[Logged()]).train()
    return records.figures()


def main() -> int:
    """Print the table below the machine.

    Returns:
        Exit status: 1 if a system failed.
    """
    options = parse_options(__doc__, systems=several(list(SYSTEMS), metavar="SYSTEM"), steps={"default": WARMUP + 40})
    measured = f"{options.steps - WARMUP} steps"
    return compare(
        __file__,
        options,
        run=run,
        columns=COLUMNS,
        machine=partial(describe, "torch", "lightning", "deepspeed"),
        heading=f"GPT-2 {options.size}, bf16, 1 x {options.tokens} tokens, {measured}",
    )


if __name__ == "__main__":
    sys.exit(main())
