"""Goes on until something happens to rank 1: ``python -m tests.training.lost_rank_worker FOLDER CAUSE DOING RANKS``.

Every rank writes the number of its process to ``at-work-<rank>`` in its fourth batch. CAUSE is a key of
:data:`CAUSES`, ``nothing``, ``activations``, which are then on storage, ``interrupted``: between backward and step, or
``all-failed``. A ModelCheckpoint in ``kept`` saves after an error.
DOING is a method of the Trainer, or a key ``fabric``. If SIGTERM ends a fit, the ranks save a checkpoint together. With
``--machines`` each rank is on a machine of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_smartinfinity import SmartInfinityFabricStrategy, SmartInfinityStrategy, TransferConfig
from lightning_smartinfinity.storage import StateStore
from lightning_smartinfinity.storage.io import deadlines as in_time
from lightning_smartinfinity.storage.state import state_store
from lightning_smartinfinity.storage.tensors.tensor_files import UnnamedFiles
from lightning_smartinfinity.zero3.ranks import collectives
from tests.helpers import fuse
from tests.helpers.models import Recipe
from tests.helpers.nodes import become_node, mount_own
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.plain import Everything
from tests.helpers.trainers import quiet_trainer

SILENCE = 4.0
"""Seconds after which a rank is lost."""

IO_TIMEOUT = 15.0
"""Seconds after which a disk is given up."""


RECIPE = Recipe(precision="bf16-mixed")


def _fail() -> None:
    raise ValueError("the fourth batch is bad")


def _let_no_disk_answer() -> None:
    """Let no commit record be written and no file be closed any more."""
    state_store.write_record = _never_return
    StateStore._close = UnnamedFiles.close = _never_return  # type: ignore[method-assign,assignment]


def _let_nothing_be_flushed() -> None:
    os.fsync = os.fdatasync = _never_return
    in_time.completed_requests = lambda _: 0  # other disks, and other processes, may be at work


def _let_mount_hang() -> None:
    """Make the file system stop answering at the next write."""
    fuse.hang(_mounted(Path(sys.argv[1])), at="WRITE")


def _mounted(folder: Path) -> Path:
    return folder / "node1"


def _never_return(*_: Any, **__: Any) -> Any:
    time.sleep(100 * IO_TIMEOUT)


CAUSES: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "failed": _fail,
    "dead-disk": _let_no_disk_answer,
    "dead-disk-in-save": _let_nothing_be_flushed,
    "dead-mount": _let_mount_hang,
}


def happen(batch: int, *, rank: int, folder: Path, cause: str) -> None:
    """Let it happen to rank 1 in the fourth batch."""
    if batch == 3:
        (folder / f"at-work-{rank}").write_text(str(os.getpid()))
        if rank == 1 and cause in CAUSES:
            CAUSES[cause]()
        if cause == "all-failed":
            _fail()


class Happening(pl.Callback):
    """A callback by which something happens to rank 1 in the fourth batch."""

    def __init__(self, folder: Path, cause: str) -> None:
        self.folder, self.cause = folder, cause

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        happen(trainer.global_step, rank=trainer.global_rank, folder=self.folder, cause=self.cause)
        if self.cause == "dead-disk-in-save" and trainer.global_step == 3:
            trainer.save_checkpoint(self.folder / "last.ckpt")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.cause == "interrupted" and trainer.global_rank == 1 and trainer.global_step == 3:
            raise KeyboardInterrupt

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        happen(batch_idx, rank=trainer.global_rank, folder=self.folder, cause=self.cause)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and trainer.state.fn == "fit":
            trainer.save_checkpoint(self.folder / "last.ckpt")


class _Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.repeat(RECIPE.batch(0)[0])


class Endless(Everything):
    """A module whose evaluations do not end by themselves."""

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(_Endless(), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader


def train(fabric: Fabric) -> Iterator[None]:
    """Train for ever, and tell of each batch before it begins."""
    _, model, optimizer = RECIPE.set_up(fabric)
    for batch in itertools.count():
        yield
        fabric.backward(model(RECIPE.batch(batch, fabric.global_rank, fabric.world_size)), model=model)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {"folder": Path, "cause": str, "doing": str, "ranks": int}.items():
        parser.add_argument(name, type=kind)
    parser.add_argument("--machines", action="store_true", help="each rank is on a machine of its own")
    parser.add_argument("--made-up", action="store_true", help="which is made up by its process")
    parser.add_argument("--default-limits", action="store_true", help="the limits are those of a user who sets none")
    given = parser.parse_args()
    folder, cause, doing = given.folder, given.cause, given.doing
    if given.made_up:
        become_node(int(os.environ["RANK"]), scratch=folder)
    if cause == "dead-mount" and os.environ["RANK"] == "1":  # its storage is a real file system that hangs
        for path in (folder / "disk", _mounted(folder)):
            path.mkdir()
        mount_own(folder, folder)
        fuse.mount(folder / "disk", _mounted(folder))
    options: dict[str, Any] = {"overlap": "none"}
    if not given.default_limits:
        collectives._ENDING_LIMIT = timedelta(seconds=2)
        options |= {"watchdog_timeout": SILENCE, "transfer": TransferConfig(io_timeout=IO_TIMEOUT)}
    if cause == "dead-disk":
        offload = {"device": "nvme", "nvme_path": str(folder / "{node}" / "parameters")}
        options["zero"] = {"offload_param": offload, "stage3_param_persistence_threshold": 0}
    if cause == "activations":
        options["activations"] = EVERYTHING
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background ignores
    storage = folder / "{node}" / "storage"
    count = {"devices": 1, "num_nodes": given.ranks} if given.machines else {"devices": given.ranks}
    if doing == "fabric":
        strategy = SmartInfinityFabricStrategy(storage, **options)
        fabric = Fabric(accelerator="cpu", **count, strategy=strategy, precision="bf16-mixed")
        fabric.launch()
        for batch, _ in enumerate(train(fabric)):
            happen(batch, rank=fabric.global_rank, folder=folder, cause=cause)
    trainer = quiet_trainer(
        folder,
        SmartInfinityStrategy(storage, **options),
        **count,
        max_steps=1_000_000,
        limit_val_batches=0 if doing == "fit" else None,
        enable_checkpointing=True,
        callbacks=[Happening(folder, cause), ModelCheckpoint(folder / "kept", save_top_k=0, save_on_exception=True)],
    )
    getattr(trainer, doing)(Endless(RECIPE))


if __name__ == "__main__":
    main()
