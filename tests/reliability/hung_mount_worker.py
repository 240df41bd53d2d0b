"""Trains on a file system of its own until that hangs: ``... hung_mount_worker FOLDER WHEN AT NUMBER CAUSE [keeps]``.

WHEN is ``setup``, ``step``, ``save``, ``beside`` (a save beside the training) or ``parameters`` (a step with parameters
on storage). From the request AT of this NUMBER on, the file system hangs as
:func:`tests.helpers.fuse.hang` describes. CAUSE is ``timeout`` (of two seconds), ``default`` (the default timeout), or
the name of a signal that the process then sends to itself. The file ``ended`` is written when the error leaves the fit,
and says ``gone`` if the file system is gone by then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers import fuse
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.nodes import mount_own
from tests.helpers.trainers import quiet_trainer

STEPS = 4
LIMITS = {"timeout": 2.0, "default": TransferConfig().io_timeout}


class Hangs(pl.Callback):
    """Lets the file system hang at a moment of the training."""

    def __init__(self, within: Path, when: str, how: dict[str, Any], cause: str) -> None:
        self._within, self._when, self._how, self._cause = within, when, how, cause

    def now(self, when: str) -> None:
        if when == self._when:
            self._when = ""
            fuse.hang(self._within, **self._how)
            if self._cause not in LIMITS:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.Signals[self._cause])).start()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            self.now("step")
            self.now("parameters")
            self.now("beside")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._when == "save" and trainer.global_step == STEPS - 1:
            self.now("save")
            trainer.save_checkpoint(self._within / "saved")


def main() -> None:
    """Train, and let the error end the process."""
    root, (when, at, number, cause, *keeps) = Path(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("disk", "mounted"):
        (root / name).mkdir()
    mount_own(root, root)
    mounted = root / "mounted"
    server = fuse.mount(root / "disk", mounted)
    (mounted / "written").touch()  # the kernel has learned that the server has nothing to do when a file is closed
    hangs = Hangs(mounted, when, {"at": at, "number": int(number), "keeps": bool(keeps)}, cause)
    callbacks: list[Any] = [hangs]
    if when == "beside":
        callbacks.append(ModelCheckpoint(mounted / "checkpoints", every_n_train_steps=1, save_top_k=-1))
    zero = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
    strategy = SmartInfinityStrategy(
        mounted / "storage",
        transfer=TransferConfig(io_timeout=LIMITS.get(cause, 1000.0)),
        zero=zero if when == "parameters" else None,
    )
    settings: dict[str, Any] = {"enable_checkpointing": True} if when == "beside" else {}
    trainer = quiet_trainer(root, strategy, max_steps=STEPS, callbacks=callbacks, **settings)
    try:
        hangs.now("setup")
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed", width=64)))
        strategy.close()
    finally:
        gone = os.waitpid(server, os.WNOHANG)[0] == server
        (root / "ended").write_text("gone" if gone else str(time.time()))


if __name__ == "__main__":
    main()
