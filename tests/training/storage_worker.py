"""Trains, or resumes from storage: ``python -m tests.training.storage_worker RUN.json``.

Every rank appends a line for each step to ``steps-<rank>.txt``, and writes ``end-<rank>.json`` when its fit is over.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_smartinfinity import SmartInfinityStrategy, SmartSSDConfig, TopK
from lightning_smartinfinity.errors import StorageFullError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.layout import partition_layout
from lightning_smartinfinity.storage import StateStore
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.folders.rank_folder import RankFolder
from lightning_smartinfinity.storage.records.record_writes import TrainingRecords
from lightning_smartinfinity.storage.records.training_record import TrainingRecord
from lightning_smartinfinity.zero3.checkpoints.save.background_saves import BackgroundSaves
from lightning_smartinfinity.zero3.ranks.background_jobs import BackgroundJobs
from lightning_smartinfinity.zero3.setup import open_storage as storage, rank_migration
from tests.helpers.interrupted_runs import kill_later, launch_run, state_digest
from tests.helpers.nodes import become_node, mount_own
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import await_that
from tests.training.asynchronous_worker import save_beside
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

NEXT_BATCH = threading.Event()


@dataclass(frozen=True)
class StorageRun:
    """A fit, and how it is interrupted."""

    out: str
    storage: str | list[str]
    devices: int = 1  # processes in all
    machines: int = 1  # on which they are
    made_up: list[int] = field(default_factory=list)  # the machine of each process, if processes stand for machines
    disks: bool = False  # whether each of these has a disk of its own at "disk", which is "disk-<machine>" here
    cards: bool = False  # whether emulated SmartSSDs update, one for each folder
    resume: bool = False
    checkpoint: str = ""  # from which the fit resumes, in place of storage
    seed: int = 1
    epochs: int = 3
    kill_at: str = ""  # how and when: "kill at step"; see die
    kill_step: int = 0
    kill_rank: int = 0
    kill_after: float = 0.0  # seconds after that moment
    checkpoints: list[dict[str, Any]] = field(default_factory=list)  # settings of ModelCheckpoints
    fails: list[int] = field(default_factory=list)  # on which rank, and behind which steps: see fail_to_record
    save_every: int = 0  # steps between checkpoints, which are saved beside the training
    granule: int = 0  # elements that the size of tasklets is rounded to; 0: as this version does
    spread_every: int = 0  # steps between moves of all but one tasklet from folder to folder
    trainer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)


def launch(run: StorageRun, *, ends: int | None = None) -> tuple[int, str]:
    """Run in forked processes; return the exit status, which has to be ``ends`` if that is given, and the output."""
    code, output = launch_run("tests.training.storage_worker", run)
    assert ends in (None, code), output[-4000:]
    return code, output


def steps_of(out: Path, rank: int = 0) -> dict[int, str]:
    """Return what each step wrote, by its number; that of the last try counts."""
    path = out / f"steps-{rank}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(line.split()[0]): line for line in lines}


def end_of(out: Path, rank: int = 0) -> dict[str, Any]:
    """Return the result of a fit that came to its end."""
    return json.loads((out / f"end-{rank}.json").read_text())  # type: ignore[no-any-return]


class Noisy(Dataset[torch.Tensor]):
    """Items that depend on the random numbers of all three generators."""

    def __init__(self, *, length: int, noise: bool) -> None:
        self.items = torch.randn(length, 8, generator=torch.Generator().manual_seed(3))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.noise:
            return self.items[index]
        return self.items[index] + torch.randn(8) * 0.1 + float(np.random.rand()) * 0.1 + random.random() * 0.1


class Module(pl.LightningModule):
    """A module with buffers that change, dropout, a scheduler, and logged values that callbacks follow."""

    def __init__(self, run: StorageRun) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings = {"width": 24, "batch": 2, "length": 12, "noise": True, "plateau": False, "steps": 1}
        settings |= {"turned": False, "last": 0.0, "shuffle": True, "dropout": 0.3, "scale": 1.0}
        self.settings = {**settings, "optimizer": "AdamW", "optimizer_settings": {}, **run.module}
        width = self.settings["width"]
        self.net = nn.Sequential(
            nn.Linear(8, width),
            nn.BatchNorm1d(width),
            nn.Dropout(self.settings["dropout"]),
            nn.Linear(width, width),
            nn.Linear(width, 3),
        )
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        if self.settings["turned"]:
            self.net[0].weight = nn.Parameter(self.net[0].weight.detach().T.clone())
        if self.settings["last"]:
            self.table = nn.Embedding(10_000, 8)
            self.table.weight.requires_grad_(False)[-1, -1] = self.settings["last"]
        self.run, self.seen = run, 0
        self.automatic_optimization = self.settings["steps"] == 1

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        for _ in range(self.settings["steps"]):
            loss = self.net(batch + self.frozen(batch)).float().pow(2).mean() * self.settings["scale"]
            self.log("loss", loss)
            self.last_loss = float(loss)
            if not self.automatic_optimization:
                optimizer: Any = self.optimizers()
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        die(self.run, "saved batch end", self.trainer)
        if self.trainer.global_step % 6 == 0:
            self.seen += int(torch.randint(9, ()))

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.net(batch + torch.rand(1)).float().pow(2).mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def configure_optimizers(self) -> Any:
        name, settings = self.settings["optimizer"], self.settings["optimizer_settings"]
        optimizer = getattr(torch.optim, name)(self.net.parameters(), lr=0.01, **settings)
        if self.settings["plateau"]:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=60, cycle_momentum=name == "AdamW")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        data = Noisy(length=self.settings["length"], noise=self.settings["noise"])
        return DataLoader(data, batch_size=self.settings["batch"], shuffle=self.settings["shuffle"])

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(length=4, noise=False), batch_size=2)


class Watch(pl.Callback):
    """Writes down every step, and counts its hooks in its state."""

    def __init__(self, run: StorageRun) -> None:
        self.run, self.count = run, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "odd": (1, {2: float("inf")}, torch.ones(2))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["odd"][:2] == (1, {2: float("inf")})
        self.count = state["count"]

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.count += 1
        module.seen += 1
        die(self.run, "batch end", trainer)
        values = [module.last_loss.hex(), self.count, module.seen, trainer.optimizers[0].param_groups[0]["lr"].hex()]
        with open(Path(self.run.out) / f"steps-{trainer.global_rank}.txt", "a") as file:
            file.write(" ".join(map(str, [trainer.global_step, *values])) + "\n")
        if self.run.save_every and trainer.global_step % self.run.save_every == 0:
            die(self.run, "save", trainer)
            save_beside(trainer, Path(self.run.out) / "last.ckpt")

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        die(self.run, "validation", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        die(self.run, "epoch end", trainer)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        die(self.run, "backward", trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        die(self.run, "step", trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        NEXT_BATCH.set()
        die(self.run, "batch start", trainer)
        if self.run.spread_every and trainer.global_step % self.run.spread_every == 0:
            handler = trainer.strategy._training_optimizer.update.drained_handler()  # type: ignore[attr-defined]
            die(self.run, "growth", trainer)
            spread(handler._store, last=trainer.global_step % (2 * self.run.spread_every) == 0)


def spread(store: Any, *, last: bool) -> None:
    """Give all tasklets but one of each folder to the first folder, or to the last one: its file grows."""
    counts = [1] * len(store.counts)
    counts[-1 if last else 0] += sum(store.counts) - sum(counts)
    store.spread(counts)


def kill(run: StorageRun) -> None:
    """Kill this process, now or after the run's seconds."""
    if run.kill_after:
        kill_later(run.kill_after)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def die(run: StorageRun, moment: str, trainer: pl.Trainer) -> None:
    """End in the way that the run asks for, if this is the moment.

    The moments are ``start`` (of the set-up), ``batch start``, ``backward``, ``step``, ``batch end``, ``saved batch
    end`` (when ModelCheckpoints have saved), ``validation``, ``epoch end``, ``save``, ``growth`` (of the state files),
    ``end`` (of the fit) and ``saved end``. :func:`kill_in_copy` and :data:`CALLS` have more.
    """
    how, _, when = run.kill_at.partition(" at ")
    if when != moment or trainer.global_step != run.kill_step or trainer.global_rank != run.kill_rank:
        return
    if how == "kill":
        kill(run)
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "error":
        raise RuntimeError("an error of the user's")
    if how == "exit":
        sys.exit(1)
    if how == "interrupt":
        raise KeyboardInterrupt


CHANGE: dict[str, tuple[Any, str]] = {
    "way made": (storage, "_create_store"),
    "fill": (rank_migration._Sources, "read"),
    "first record": (StateStore, "record_training"),
    "removal": (RankFolder, "destroy"),
}
"""Moments of a change to another number of processes, each with the function that begins it."""
CALLS = {
    **CHANGE,
    "record of an interval": (TrainingRecords, "_store"),  # of the run's number
    "commit of an interval": (StateStore, "_complete"),  # likewise
    "load": (storage, "recover_for_training"),
    "link": (ModelCheckpoint, "_link_checkpoint"),  # of the run's number
}


def kill_at_call(run: StorageRun) -> None:
    """Let a process be killed when it calls the function of the run's moment."""
    owner, name = CALLS[run.kill_at.removeprefix("kill at ")]
    do, numbers = getattr(owner, name), itertools.count(1)

    def die_or_do(*args: Any, **kwargs: Any) -> Any:
        is_due = next(numbers) == max(run.kill_step, 1)
        if is_due and torch.distributed.get_rank() == run.kill_rank:
            kill(run)
        return do(*args, **kwargs)

    setattr(owner, name, staticmethod(die_or_do) if owner is ModelCheckpoint else die_or_do)


def interrupt_update(run: StorageRun) -> None:
    """Let a process get Ctrl-C within the update of the run's step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may have inherited another one
    begin = TransferHandler.begin_step

    def begin_and_die(handler: TransferHandler, plan: Any) -> None:
        begin(handler, plan)
        if handler.steps.max() + 1 == run.kill_step:
            os.kill(os.getpid(), signal.SIGINT)

    TransferHandler.begin_step = begin_and_die  # type: ignore[method-assign]


def refuse_step(run: StorageRun) -> None:
    """Make the run's step fail to begin on the rank of the run; every rank then fails at its next batch.

    If the rank is -1, the step fails to begin on every rank.
    """
    prepare, start = TransferHandler._prepare, Watch.on_train_batch_start

    def prepare_or_fail(handler: TransferHandler) -> None:
        if handler.num_steps + 1 == run.kill_step and run.kill_rank in (-1, torch.distributed.get_rank()):
            raise StorageFullError("A test has no space for the step.", "Let it go on.")
        prepare(handler)

    def start_or_fail(watch: Watch, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == run.kill_step and run.kill_rank >= 0:
            raise RuntimeError("an error of the user's")
        start(watch, trainer, *args)

    TransferHandler._prepare = prepare_or_fail  # type: ignore[method-assign]
    Watch.on_train_batch_start = start_or_fail  # type: ignore[assignment, method-assign]


def kill_in_copy(run: StorageRun) -> None:
    """Let a process be killed within the copy of the save of the run's number, when it has begun the next batch.

    If it waits for the copy, it is killed at once.
    """
    complete, numbers = BackgroundSaves.complete, itertools.count(1)

    def die(jobs: BackgroundJobs, seconds: float) -> None:
        await_that(lambda: NEXT_BATCH.is_set() or jobs._is_awaited.is_set())
        os.kill(os.getpid(), signal.SIGKILL)

    def die_or_complete(*args: Any) -> None:
        if next(numbers) == run.kill_step and torch.distributed.get_rank() == run.kill_rank:
            NEXT_BATCH.clear()
            BackgroundJobs.pause = die  # type: ignore[method-assign]
        complete(*args)

    BackgroundSaves.complete = die_or_complete  # type: ignore[method-assign]


def fail_to_record(run: StorageRun) -> None:
    """Let the records of one rank fail behind some steps, as on a full disk."""
    write, (rank, first, last) = TrainingRecords._write, run.fails or (0, 0, -1)

    def fail_or_write(records: TrainingRecords, record: TrainingRecord) -> int:
        if torch.distributed.get_rank() == rank and first <= record.step <= last:
            raise StorageFullError("A test has no space for the record.", "Let it go on.")
        return write(records, record)

    TrainingRecords._write = fail_or_write  # type: ignore[method-assign]


def strategy_of(run: StorageRun) -> SmartInfinityStrategy:
    """Return the strategy that a run asks for."""
    options = dict(run.options)
    if "compression" in options:  # as JSON has it
        options["compression"] = TopK(**options["compression"])
    if run.cards:
        cards = EmulatedCards(build())
        cards.reset()
        options |= {"update_device": "smartssd", "smartssd": SmartSSDConfig(xclbin=cards.build.xclbin)}
    transfer = {"tasklet_bytes": 64 * 1024, "num_buffers": 2, **run.transfer}
    return SmartInfinityStrategy(run.storage, transfer=transfer, **options)


def main(path: str) -> None:
    """Fit as the run in a file says."""
    run = StorageRun(**json.loads(Path(path).read_text()))
    if run.made_up:
        rank, scratch = int(os.environ["RANK"]), Path(run.out)
        become_node(run.made_up[rank], scratch=scratch, node_rank=rank)
        if run.disks:
            mount_own(scratch / f"disk-{run.made_up[rank]}", scratch / "disk")
    if run.kill_at.removeprefix("kill at ") in CALLS:
        kill_at_call(run)
    fail_to_record(run)
    if run.kill_at == "ctrl-c at update":
        interrupt_update(run)
    if run.kill_at == "no begin":
        refuse_step(run)
    if run.granule:
        partition_layout._LEAST_GRADIENT_BYTES = BLOCK_BYTES // run.granule
    if run.kill_at == "kill at copy":
        kill_in_copy(run)
    fit(run)


def fit(run: StorageRun) -> SmartInfinityStrategy:
    """Fit as one of the run's processes; return the strategy."""
    pl.seed_everything(run.seed)
    module, watch = Module(run), Watch(run)
    strategy = strategy_of(run)
    checkpoints = [ModelCheckpoint(dirpath=Path(run.out) / "saved", **settings) for settings in run.checkpoints]
    trainer = quiet_trainer(
        Path(run.out),
        strategy,
        devices=run.devices // run.machines,
        num_nodes=run.machines,
        max_epochs=run.epochs,
        callbacks=[*checkpoints, watch],
        enable_checkpointing=bool(checkpoints),
        **{"precision": "bf16-mixed", "num_sanity_val_steps": 0, **run.trainer},
    )
    die(run, "start", trainer)
    trainer.fit(module, ckpt_path=run.checkpoint or ("storage" if run.resume else None))
    die(run, "end", trainer)
    if run.kill_at.endswith("at saved end"):
        trainer.save_checkpoint(Path(run.out) / "end.ckpt")
    die(run, "saved end", trainer)
    optimizer = strategy._training_optimizer
    assert optimizer is not None
    end = {
        "state": state_digest(optimizer, module),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "seen": module.seen,
        "random": [torch.rand(1).item(), float(np.random.rand()), random.random()],
        "index": [[*one.best_k_models, one.best_model_path, one.last_model_path] for one in checkpoints],
    }
    (Path(run.out) / f"end-{trainer.global_rank}.json").write_text(json.dumps(end))
    if checkpoints:
        trainer.validate(module, ckpt_path="best")
    return strategy


if __name__ == "__main__":
    main(sys.argv[1])
