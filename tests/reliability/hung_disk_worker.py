"""Trains until a disk stops answering: ``python -m tests.reliability.hung_disk_worker FOLDER CAUSE OVERLAP FILE``.

CAUSE is ``timeout``, or the name of a signal that the process then sends to itself. FILE is ``state``, ``parameters``
or ``all`` (two disks, one with the state and one with the parameters, on which no file can be closed either). The file
``ended.json`` says what came out of the fit and of closing everything, and after how many seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.storage.state import state_store
from lightning_smartinfinity.storage.tensors import tensor_files
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import Hold
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT, await_that

EVERY = 1_000_000
TIMEOUT = 2.0


class HungDisk(pl.Callback):
    """Disks that answer no read any more from the second step on.

    Args:
        cause: What ends the training: ``timeout``, or the name of a signal.
        file: What is not answered.
    """

    def __init__(self, cause: str, file: str) -> None:
        self._cause = cause
        self._file = file
        self._holds: list[Hold] = []
        self.since = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            strategy: Any = trainer.strategy
            if self._file in ("state", "all"):
                strategy.drain()
                device = strategy._training_optimizer.rank_state.handler._device
                self._holds.append(Hold(device.pipeline, read_at=0, count=EVERY))
            if self._file in ("parameters", "all"):
                self._holds.append(Hold(strategy._parameters.store.core, read_at=0, count=EVERY))
            if self._file == "all":
                state_store.StateStore.release = self._never_return  # type: ignore[method-assign]
                tensor_files.UnnamedFiles.close = self._never_return  # type: ignore[method-assign]
            threading.Thread(target=self._end, daemon=True).start()

    def _never_return(self, *_: Any, **__: Any) -> None:
        time.sleep(10 * LIMIT)

    def _end(self) -> None:
        await_that(lambda: any(hold.count > 0 for hold in self._holds))
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
    offload = {"device": "nvme", "nvme_path": str(root / "storage-2")}
    zero = {"offload_param": offload, "stage3_param_persistence_threshold": 0}
    strategy = SmartInfinityStrategy(
        root / "storage", transfer=transfer, overlap=overlap, zero=zero if file in ("parameters", "all") else None
    )
    trainer = quiet_trainer(root, strategy, callbacks=[disk])
    try:
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed", width=64)))
    except BaseException as error:
        if file == "all":
            assert strategy._parameters is not None
            for close in (lambda: strategy._close_state(since="the end"), lambda: strategy._parameters.leave(strategy)):
                with suppress(StorageTimeoutError):
                    close()
        told = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - disk.since}
        (root / "ended.json").write_text(json.dumps(told))
        raise


if __name__ == "__main__":
    main()
