"""Trains until a disk stops answering: ``python -m tests.reliability.hung_disk_worker FOLDER CAUSE WHEN HOW...``.

CAUSE is ``timeout`` (of two seconds), ``default`` (the default timeout), or the name of a signal that the process then
sends to itself. WHEN is ``reads``: from the second step on, this process holds back reads of the state, and HOW is the
overlap. Or a mounted file system hangs as :func:`tests.helpers.fuse.hang` describes: from WHEN on, which is
``setup``, ``step``, ``save``, ``beside`` (a save beside the training) or ``parameters`` (a step with parameters on
storage), and then at the request HOW: ``AT NUMBER [keeps]``. The file ``ended.json`` says what came out of the fit,
after how many seconds, and whether the file system was gone by then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers import fuse
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import Hold
from tests.helpers.nodes import mount_own
from tests.helpers.trainers import quiet_trainer

STEPS = 4
LIMITS = {"timeout": 2.0, "default": TransferConfig().io_timeout}


class HungDisk(pl.Callback):
    """Lets a disk hang at a moment of the training, and sends the signal a second later.

    Attributes:
        since: When what ends the training began, by the monotonic clock.
    """

    def __init__(self, folder: Path, when: str, cause: str, hang: Callable[[], object]) -> None:
        self._folder, self._when, self._cause, self._hang = folder, when, cause, hang
        self.since = 0.0

    def now(self, when: str) -> None:
        if when == self._when:
            self._when, self.since = "", time.monotonic()
            self._held = self._hang()
            if self._cause not in LIMITS:
                threading.Timer(1.0, self._signal).start()

    def _signal(self) -> None:
        self.since = time.monotonic()
        os.kill(os.getpid(), signal.Signals[self._cause])

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            for when in ("reads", "step", "parameters", "beside"):
                self.now(when)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._when == "save" and trainer.global_step == STEPS - 1:
            self.now("save")
            trainer.save_checkpoint(self._folder / "saved")


def mount(root: Path) -> tuple[Path, int]:
    """Mount a file system of this process's own; return its folder and its server's process id."""
    folder = root / "mounted"
    for path in (root / "disk", folder):
        path.mkdir()
    mount_own(root, root)
    server = fuse.mount(root / "disk", folder)
    (folder / "written").touch()  # the kernel has learned that the server has nothing to do when a file is closed
    return folder, server


def main() -> None:
    """Train, and let the error end the process."""
    root, cause, when, at, *more = Path(sys.argv[1]), *sys.argv[2:]
    # A process that a shell started in the background ignores Ctrl-C, and so do all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, server = (root, 0) if when == "reads" else mount(root)
    options: dict[str, Any] = {"overlap": at} if when == "reads" else {}
    if when == "parameters":
        options["zero"] = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
    strategy = SmartInfinityStrategy(
        folder / "storage", transfer=TransferConfig(io_timeout=LIMITS.get(cause, 1000.0)), **options
    )

    def hang() -> object:
        if when != "reads":
            return fuse.hang(folder, at=at, number=int(more[0]), keeps=len(more) > 1)
        strategy.drain()
        optimizer: Any = strategy._training_optimizer
        return Hold(optimizer.rank_state.handler._device.pipeline, read_at=0, count=1_000_000)

    disk = HungDisk(folder, when, cause, hang)
    callbacks: list[Any] = [disk]
    if when == "beside":
        callbacks.append(ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1, save_top_k=-1))
    trainer = quiet_trainer(root, strategy, max_steps=STEPS, callbacks=callbacks, enable_checkpointing=when == "beside")
    try:
        disk.now("setup")
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed", width=64)))
        strategy.close()
    except BaseException as error:
        gone = bool(server) and os.waitpid(server, os.WNOHANG)[0] == server
        told = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - disk.since}
        (root / "ended.json").write_text(json.dumps({**told, "gone": gone}))
        raise


if __name__ == "__main__":
    main()
