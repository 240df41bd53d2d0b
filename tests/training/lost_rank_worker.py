"""Trains on two ranks until something happens to rank 1: ``python -m tests.training.lost_rank_worker FOLDER CAUSE``.

Every rank writes a file ``training-<rank>`` when it trains. CAUSE is a key of :data:`CAUSES`, or ``nothing``. If
SIGTERM ends the training, the ranks save a checkpoint together.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_smartinfinity import SmartInfinityStrategy
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

SILENCE = 4.0
"""Seconds after which a rank is lost."""


def _fail(strategy: Any) -> None:
    raise ValueError("the fourth batch is bad")


CAUSES: dict[str, Callable[[Any], None]] = {
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "terminated": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "failed": _fail,
}


class Happening(pl.Callback):
    """A callback by which something happens to rank 1 in the fourth batch."""

    def __init__(self, folder: Path, cause: str) -> None:
        self.folder, self.cause = folder, cause

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            (self.folder / f"training-{trainer.global_rank}").touch()
            if trainer.global_rank == 1 and self.cause in CAUSES:
                CAUSES[self.cause](trainer.strategy)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self.folder / "last.ckpt")


class Saying(DummyLogger):
    """A logger that says how the training ended."""

    def finalize(self, status: str) -> None:
        print(f"The logger ended with {status!r}.", flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    trainer = quiet_trainer(
        folder,
        SmartInfinityStrategy(folder / "storage", overlap="none", watchdog_timeout=SILENCE),
        devices=2,
        max_steps=1_000_000,
        logger=Saying(),
        callbacks=[Happening(folder, sys.argv[2])],
    )
    trainer.fit(LitTiny(Recipe(precision="bf16-mixed")))


if __name__ == "__main__":
    main()
