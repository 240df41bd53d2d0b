"""Trains until a disk stops answering: ``python -m tests.reliability.hung_disk_worker FOLDER CAUSE OVERLAP FILE``.

CAUSE is ``timeout``, or the name of a signal that the process then sends to itself. FILE is ``state``, ``parameters``
or ``commit`` (the commit record, which is not written then). The file ``ended.json`` says what came out of the fit, and
after how many seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from lightning_smartinfinity.store import state_store
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import Hold
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT, await_that

EVERY = 1_000_000
TIMEOUT = 2.0


class HungDisk(pl.Callback):
    """A disk that answers no read, or no write of the commit record, any more from the second step on.

    Args:
        cause: What ends the training: ``timeout``, or the name of a signal.
        file: The file whose reads are not answered.
    """

    def __init__(self, cause: str, file: str) -> None:
        self._cause = cause
        self._file = file
        self._hold: Hold | None = None
        self._asked = threading.Event()
        self.since = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            strategy: Any = trainer.strategy
            if self._file == "commit":
                strategy.drain()
                state_store.write_record = self._never_write
            elif self._file == "parameters":
                self._hold = Hold(strategy._parameters.store.core, read_at=0, count=EVERY)
            else:
                strategy.drain()
                device = strategy._near_storage_optimizer.rank_state.handler._device
                self._hold = Hold(device.pipeline, read_at=0, count=EVERY)
            threading.Thread(target=self._end, daemon=True).start()

    def _never_write(self, *_: Any, **__: Any) -> int:
        self._asked.set()
        time.sleep(10 * LIMIT)
        return 0

    def _end(self) -> None:
        hold = self._hold
        await_that(self._asked.is_set if hold is None else lambda: hold.count > 0)
        time.sleep(0.3)  # the training now waits for the disk
        self.since = time.monotonic()
        if self._cause != "timeout":
            os.kill(os.getpid(), signal.Signals[self._cause])


def main() -> None:
    """Train, and record what came out of the fit."""
    root, cause, overlap, file = Path(sys.argv[1]), *sys.argv[2:]
    # A process that a shell started in the background ignores Ctrl-C, and so do all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    disk = HungDisk(cause, file)
    transfer = TransferConfig(io_timeout=TIMEOUT if cause == "timeout" else 10 * LIMIT)
    zero = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
    strategy = SmartInfinityStrategy(
        root / "storage", transfer=transfer, overlap=overlap, zero=zero if file == "parameters" else None
    )
    trainer = quiet_trainer(root, strategy, callbacks=[disk])
    try:
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed", width=64)))
    except BaseException as error:
        told = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - disk.since}
        (root / "ended.json").write_text(json.dumps(told))
        raise


if __name__ == "__main__":
    main()
