"""Times the steps of GPT-2 around a checkpoint: before it, while it is being saved, and after it.

    python benchmarks/checkpoint_stall.py --size 124m --systems beside waits stock

A ModelCheckpoint saves after one step. ``beside`` saves while training goes on, ``waits`` with
``TransferConfig(asynchronous=False)``. ``stock`` is Lightning's DeepSpeedStrategy(stage=3) with the optimizer state in
host memory, whose checkpoint needs no reads: with the state on NVMe, stock DeepSpeed's checkpoint lacks the masters.
A step reaches from the start of its batch to the start of the next one, so it contains what a callback does behind it.
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
    """Train in this process until a checkpoint is whole and some more steps are done."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Clock(pl.Callback):
        """Records when each batch starts, and whether a save is in progress then, of which there is only one."""

        def __init__(self) -> None:
            self.starts: list[tuple[float, bool]] = []

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            saving = any(thread.name == "smart-infinity-save" for thread in threading.enumerate())
            self.starts.append((time.perf_counter(), saving))
            if checkpoint._last_global_step_saved:
                checkpoint._every_n_train_steps = 0
            behind = [saving for _, saving in self.starts[options.steps + WARMUP :]]
            trainer.should_stop = len(behind) > options.steps and not any(behind[-options.steps :])

    folder, save_at = options.storage, options.steps + WARMUP
    clock = Clock()
    checkpoint = ModelCheckpoint(dirpath=Path(folder) / "checkpoints", every_n_train_steps=save_at)
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
    return summary(clock.starts, save_at)


def _strategy(system: str, folder: str) -> Any:
    if system == "stock":
        return strategy_of("stock", folder)
    from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig

    zero = {"sub_group_size": SUB_GROUP, "reduce_bucket_size": BUCKET}
    return SmartInfinityStrategy(folder, zero=zero, transfer=TransferConfig(asynchronous=system == "beside"))


def summary(starts: list[tuple[float, bool]], save_at: int) -> Figures:
    """Return a system's row.

    Args:
        starts: When each batch started, and whether a save was in progress then.
        save_at: Number of the batch at whose end the save began.
    """
    times = [time for time, _ in starts]
    seconds = [later - earlier for earlier, later in pairwise(times)]
    with_save = [number for number in range(len(seconds)) if number == save_at - 1 or starts[number][1]]
    during = [seconds[number] for number in with_save[1:]]
    plain = [each for number, each in enumerate(seconds) if number >= WARMUP and number not in with_save]
    median, longest = statistics.median(plain), max(seconds[number] for number in with_save)
    figures = {
        "median": median,
        "longest_plain": max(plain),
        "num_during": len(during),
        "longest": longest,
        "ratio": longest / median,
        "seconds": sum(during) + seconds[save_at - 1] - median,
        "steps": seconds,
        "with_save": with_save,
    }
    if during:
        figures |= {
            "median_during": statistics.median(during),
            "slower": 100 * (statistics.mean(during) / statistics.mean(plain) - 1),
        }
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
        steps={"default": 10, "help": "before the save, and after it"},
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
