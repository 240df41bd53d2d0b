"""Times the steps of GPT-2 around checkpoints: before each, while it is being saved, and after it.

    python benchmarks/checkpoint_stall.py --size 124m --systems beside waits stock

A ModelCheckpoint saves several times, with some steps beside no save before the first one and behind each. ``beside``
saves while training goes on, ``waits`` with ``TransferConfig(asynchronous=False)``. ``stock`` is Lightning's
DeepSpeedStrategy(stage=3) with the optimizer state in host memory, whose checkpoint needs no reads: with the state on
NVMe, stock DeepSpeed's checkpoint lacks the masters. A step reaches from the start of its batch to that of the next
one, so it contains what a callback does behind it. Our updates overlap backward: ``overlap="auto"`` would try all
overlaps in the steps that are measured. Each save is compared with the steps on both sides of it. A row has the medians
of all saves, and the longest steps of any.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from checkpoint_memory import strategy_of
from comparison import Figures, compare, parse_options, several
from machine import describe
from training import BUCKET, SUB_GROUP, WARMUP, Probe, lightning_module, quiet_trainer, tokens

SYSTEMS = ("beside", "waits", "stock")
MOST_STEPS = 2_000
COLUMNS = {
    "saves": ("num_saves", 0),
    "step s": ("median", 2),
    "longest step beside no save": ("longest_plain", 2),
    "steps during the save": ("num_during", 0),
    "step s then": ("median_during", 2),
    "slower, %": ("slower", 1),
    "longest step with a save": ("longest", 2),
    "ratio to the median": ("ratio", 2),
    "save s": ("seconds", 1),
}


def run(options: argparse.Namespace) -> Figures:
    """Train in this process until all checkpoints are whole and some more steps are done."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Clock(pl.Callback):
        """Records when each batch starts, and whether a save is in progress then, and has the checkpoints saved."""

        def __init__(self) -> None:
            self.starts: list[tuple[float, bool]] = []
            self.saves: list[int] = []  # numbers of the batches at whose ends they began
            self.num_plain = -WARMUP  # steps beside no save, since the last one

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            saving = any(thread.name == "smart-infinity-save" for thread in threading.enumerate())
            self.starts.append((time.perf_counter(), saving))
            self.num_plain = 0 if saving else self.num_plain + 1
            is_due = self.num_plain > options.steps
            trainer.should_stop = is_due and len(self.saves) == options.saves
            checkpoint._every_n_train_steps = int(is_due and not trainer.should_stop)
            if checkpoint._every_n_train_steps:
                self.saves.append(len(self.starts) - 1)
                self.num_plain = 0

    folder, clock = options.storage, Clock()
    checkpoint = ModelCheckpoint(dirpath=Path(folder) / "checkpoints", every_n_train_steps=MOST_STEPS)
    checkpoint.on_train_end = checkpoint.on_train_epoch_end = checkpoint.on_exception = lambda *_: None
    trainer = quiet_trainer(
        folder,
        _strategy(options.child, folder),
        max_steps=MOST_STEPS,
        enable_checkpointing=True,
        callbacks=[clock, checkpoint],
    )
    batches = partial(tokens, size=options.size, shape=(1, options.tokens))
    trainer.fit(lightning_module(options.size, MOST_STEPS, Probe(), batches))
    return summary(clock.starts, clock.saves, num_plain=options.steps)


def _strategy(system: str, folder: str) -> Any:
    if system == "stock":
        return strategy_of("stock", folder)
    from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig

    zero = {"sub_group_size": SUB_GROUP, "reduce_bucket_size": BUCKET}
    transfer = TransferConfig(dram_cache_bytes=0, asynchronous=system == "beside")
    return SmartInfinityStrategy(folder, overlap="backward", zero=zero, transfer=transfer)


def summary(starts: list[tuple[float, bool]], saves: list[int], *, num_plain: int) -> Figures:
    """Return a system's row.

    Args:
        starts: When each batch started, and whether a save was in progress then.
        saves: Numbers of the batches at whose ends the saves began.
        num_plain: Number of steps beside no save that a save is compared with, on each side.
    """
    times = [time for time, _ in starts]
    seconds = [later - earlier for earlier, later in pairwise(times)]
    each = [_of_save(seconds, [saving for _, saving in starts], begun, num_plain) for begun in saves]
    figures: Figures = {"num_saves": len(saves), "steps": seconds, "saves": saves}
    for key in ("median", "num_during", "median_during", "slower", "seconds"):
        if values := [of_save[key] for of_save in each if key in of_save]:
            figures[key] = statistics.median(values)
    return figures | {key: max(of_save[key] for of_save in each) for key in ("longest_plain", "longest", "ratio")}


def _of_save(seconds: list[float], saving: list[bool], begun: int, num_plain: int) -> Figures:
    """Return the figures of the save that began at the end of a batch."""
    over = next(number for number in range(begun + 1, len(saving)) if not saving[number])
    during, plain = seconds[begun + 1 : over], [*seconds[begun - num_plain : begun], *seconds[over : over + num_plain]]
    median, longest = statistics.median(plain), max(seconds[begun:over])
    figures = {
        "median": median,
        "longest_plain": max(plain),
        "num_during": len(during),
        "longest": longest,
        "ratio": longest / median,
        "seconds": sum(during) + seconds[begun] - median,
    }
    if during:
        slower = 100 * (statistics.mean(during) / statistics.mean(plain) - 1)
        figures |= {"median_during": statistics.median(during), "slower": slower}
    return figures


def main() -> int:
    """Print the table below the machine.

    Returns:
        Exit status: 1 if a system failed.
    """
    options = parse_options(
        __doc__,
        warm_up=0,
        systems=several(SYSTEMS),
        tokens={"default": 512},
        steps={"default": 10, "help": "before each save, and after it"},
        saves={"type": int, "default": 3},
    )
    return compare(
        __file__,
        options,
        run=run,
        columns=COLUMNS,
        machine=partial(describe, "torch", "lightning", "deepspeed"),
        heading=f"GPT-2 {options.size}, bf16, 1 x {options.tokens} tokens",
    )


if __name__ == "__main__":
    sys.exit(main())
