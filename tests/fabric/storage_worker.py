"""Trains a Fabric loop that records, or resumes one: ``python -m tests.fabric.storage_worker RUN.json``.

Every rank appends a line for each step to ``steps-<rank>.txt``, and writes ``end-<rank>.json`` when its loop is over.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_smartinfinity import RandomStates
from tests.fabric.worker import quiet_fabric
from tests.helpers.interrupted_runs import kill_later, launch_run, state_digest


@dataclass(frozen=True)
class FabricRun:
    """A loop, and how it is interrupted."""

    out: str
    devices: int = 1
    resume: bool = False
    checkpoint: str = ""  # from which the loop resumes, in place of storage
    is_one_script: bool = False  # whether it resumes if it can, from storage or saved.ckpt
    num_steps: int = 8
    kill_step: int = -1  # the step in which the last rank is killed
    kill_after: float = 0.0  # seconds after that step has begun
    fail_step: int = -1  # the step behind which the loop raises
    exits: bool = False  # whether it calls sys.exit there instead, as a handler of SIGTERM may
    term_step: int = -1  # it gets SIGTERM after this step, before the step has its record
    save_step: int = -1  # the step behind which the loop saves saved.ckpt
    record_every: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def launch(run: FabricRun) -> tuple[int, str]:
    """Run in forked processes; return the exit status and the output."""
    return launch_run("tests.fabric.storage_worker", run)


def train(run: FabricRun) -> None:
    """Train as the run says."""
    out = Path(run.out)
    fabric = quiet_fabric(out / "storage", devices=run.devices, precision="bf16-mixed", options=run.options)
    fabric.seed_everything(9 if run.resume else 1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 128), nn.BatchNorm1d(128), nn.Dropout(0.3), nn.Linear(128, 3))
    torch.manual_seed(5 if run.resume else 4 + fabric.global_rank)
    if run.is_one_script:
        fabric.strategy.resume("storage-or-new", checkpoints=[out / "saved.ckpt"])
    elif run.resume and not run.checkpoint:
        fabric.strategy.resume()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=100)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "random": RandomStates()}
    if run.is_one_script:
        fabric.load("storage-or-new", state)
    elif run.resume:
        fabric.load(run.checkpoint or "storage", state)
    while state["step"] < run.num_steps:
        if state["step"] == run.kill_step and fabric.global_rank == run.devices - 1:
            kill_later(run.kill_after)
        loss = model(torch.randn(4, 8)).float().pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if state["step"] + 1 == run.term_step:
            os.kill(os.getpid(), signal.SIGTERM)
        scheduler.step()
        state["step"] += 1
        with open(out / f"steps-{fabric.global_rank}.txt", "a") as file:
            file.write(f"{state['step']} {float(loss).hex()} {random.random()}\n")
        if state["step"] % run.record_every == 0:
            fabric.strategy.record(state)
        if state["step"] == run.save_step:
            fabric.save(out / "saved.ckpt", state)
        if state["step"] == run.fail_step:
            if run.exits:
                sys.exit(143)
            raise RuntimeError("an error of the user's")
    end = {"state": state_digest(optimizer.engine.optimizer, module), "random": [torch.rand(1).item(), random.random()]}
    (out / f"end-{fabric.global_rank}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    train(FabricRun(**json.loads(Path(sys.argv[1]).read_text())))
