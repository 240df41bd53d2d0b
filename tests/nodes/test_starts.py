"""``"storage-or-new"`` on two machines, one of which lacks something: both decide the same, or raise the same error."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity import SmartInfinityError
from tests.fabric.worker import quiet_fabric
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.nodes import become_node, mount_own, why_no_mounts
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer
from tests.training.actions import does

START = "storage-or-new"


class Stopped(Exception):
    """An exception in the user's code, with the step at which the training had begun."""


def fit(disk: Path) -> None:
    """Train up to step 3 with a checkpoint at step 2, as the script that is started again and again."""
    begun: list[int] = []

    def stop(trainer: pl.Trainer, _: Any) -> None:
        begun.append(trainer.global_step)
        if trainer.global_step == 3:
            raise Stopped(begun[0])

    saves = ModelCheckpoint(disk / "fit", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    settings: dict[str, Any] = {
        "callbacks": [saves, does(on_train_batch_start=stop)],
        "enable_checkpointing": True,
        "overlap": "none",
    }
    trainer = quiet_trainer(disk, num_nodes=2, max_steps=9, **settings)
    trainer.fit(LitTiny(Recipe()), ckpt_path=START)


def loop(disk: Path) -> None:
    """Do as :func:`fit` in a loop of Fabric."""
    fabric: Any = quiet_fabric(disk / "storage", num_nodes=2, precision="bf16-mixed", options={"overlap": "none"})
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 8)
    fabric.strategy.resume(START, checkpoints=[disk / "loop" / "step=2.ckpt"])
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(START, state)
    begun = state["step"]
    try:
        while state["step"] < 3:
            fabric.backward(model(torch.ones(1, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            fabric.strategy.record(state)
            if state["step"] == 2:
                fabric.save(disk / "loop" / "step=2.ckpt", state)
        raise Stopped(begun)
    finally:
        fabric.strategy.close()


def starts_on_ranks(scratch: Path, name: str) -> list[Any]:
    """Start a script where the second machine lacks something; return the step of each begin, or the error."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = "0"
    become_node(rank, scratch=scratch, node_rank=rank)
    disk, start = scratch / "disk", {"fit": fit, "loop": loop}[name]
    mount_own(scratch / f"disk-{rank}", disk)

    def begun(lacks: str = "", on: int = 2) -> Any:
        if rank == on:
            os.rename(disk / lacks, disk / "unmounted")
        try:
            start(disk)
        except Stopped as stopped:
            return stopped.args[0]
        except SmartInfinityError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
            if rank == on:
                os.rename(disk / "unmounted", disk / lacks)

    found = [begun(), begun("storage", on=1), begun("storage", on=0), begun(name, on=1)]
    shutil.rmtree(disk / "storage")
    found.append(begun(name, on=0))
    shutil.rmtree(disk / name)
    return [*found, begun()]


@pytest.mark.parametrize("name", ["fit", "loop"])
def test_machines_start_together(name: str, tmp_path: Path) -> None:
    """Without its storage or the newest checkpoint on one machine, neither begins anew: both have the same error.

    What is not the newest may be missing.
    """
    reason = why_no_mounts(tmp_path)
    if reason:
        pytest.skip(reason)
    for folder in ("disk", "disk-0", "disk-1"):
        (tmp_path / folder).mkdir()
    ours, theirs = on_ranks(starts_on_ranks, tmp_path, name)
    kinds = [one if isinstance(one, int) else one.partition(":")[0] for one in ours]
    assert kinds == [0, "StorageError", "StorageError", 3, "CheckpointError", 0]
    assert ours == theirs
