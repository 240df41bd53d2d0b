"""Writes what tests of earlier versions read: ``python -m tests.formats.earlier write NAME [KIND...]``.

``data/NAME.tar.xz`` then holds the storage of a fit that was killed, a checkpoint, a universal folder, exports, and the
values that were in them. Files of a released version stay as they are: what is written anew gets another name.

To write with an earlier commit, install that commit into an environment of its own, copy the folder ``tests`` to where
no package lies beside it, remove this package's modules from ``PRELOADED`` of ``tests/helpers/fork_server.py``, and run
the command there.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, TopK
from lightning_smartinfinity.cli import main
from tests.helpers.processes import run_module
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import convert_by_command
from tests.training.small import Small

DATA = Path(__file__).parent / "data"
STEPS = 3
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"precision": "32-true"},
    "parameters on storage": {
        "precision": "32-true",
        "zero": {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0},
    },
    "bf16": {"precision": "bf16-mixed", "state_format": "bf16"},
    "int8": {"precision": "bf16-mixed", "state_format": "int8"},
    "two processes": {"precision": "32-true"},
    "compressed": {"precision": "bf16-mixed", "compression": TopK(0.25)},
}
"""Kinds of trainings by Lightning's Trainer: its precision, and settings of the strategy."""

VARIED = "16-mixed"
"""A kind with a loss scaler, a schedule, two loaders, one of them with a worker, and two storage folders."""

SOURCES = {"fabric": ["storage"], "transformers": ["storage", "checkpoint"]}
"""Trainings by other loops (:mod:`tests.formats.loops`), and what they leave to go on from: no exports, no universal
folders."""

ARCHIVES: Mapping[str, Sequence[str]] = {
    "2026-11-23": ["plain"],
    "2026-11-24": ["plain"],
    "2026-11-25": ["plain"],
    "2026-11-25-evening": ["plain", "compressed", "two processes"],
    "2026-11-29": list(KINDS),
    "0.1.0.dev5": ["compressed", *SOURCES],
    "0.1.0.dev6": ["plain", "parameters on storage", "int8", "two processes"],
}
"""The archives, and the kinds of trainings in them. The commits that wrote them, and what differs from later ones:

- b2511c28: manifests of version 3, smaller tasklets, no training records.
- 9fbb1d3c: training records of version 1, no shapes in manifests, smaller tasklets.
- 02735895: training records of version 2, smaller tasklets.
- f238a832: training records of version 3 that keep the loaders' positions in the fit loop, smaller tasklets.
- e0aab2a0: training records of version 3, manifests of version 4, checkpoints of version 1.
- e81dd785: training records of version 4, manifests of version 5, checkpoints of version 2, exports with checksums.
- cc8893a2: the same, with locks of version 1.
"""


class Noting(Small):
    """A network that notes the first elements of each batch."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self.batches: list[list[float]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        batch = torch.cat([*batch]) if isinstance(batch, list) else batch
        self.batches.append(batch[:, 0].tolist())
        return super().training_step(batch, index)


class Varied(Noting):
    """Trains by :data:`VARIED`."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}

    def train_dataloader(self) -> Any:
        plain = super().train_dataloader()
        return CombinedLoader([plain, DataLoader(plain.dataset, batch_size=2, num_workers=1)], "min_size")


def values_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the fp32 values of a module's parameters, and of their states. Collective."""
    values = {}
    for name, param in module.named_parameters():
        values[name] = safe_get_full_fp32_param(param)
        for state in ("exp_avg", "exp_avg_sq"):
            values[f"{name}.{state}"] = safe_get_full_optimizer_state(param, state)
    return values


def fitted(kind: str, root: Path, *, resume: str | None = None, **hooks: Any) -> Small:
    """Fit a small model in a folder, and call functions in its hooks.

    Args:
        kind: One of :data:`KINDS`, or :data:`VARIED`.
        root: The folder; storage is in it.
        resume: What the fit goes on from.
        **hooks: The functions, by the names of the hooks; each is given the module.
    """
    settings = {"precision": VARIED} if kind == VARIED else dict(KINDS[kind])
    precision = settings.pop("precision")
    storage = [root / "storage", root / "more"] if kind == VARIED else root / "storage"
    strategy = SmartInfinityStrategy(storage, overlap="none", **settings)
    # A record of this kind also holds the index of the checkpoints.
    callbacks = [ModelCheckpoint(root / "kept", every_n_train_steps=2)] if kind == "compressed" else None
    trainer = quiet_trainer(
        root,
        strategy,
        precision=precision,
        max_steps=STEPS + 2,
        devices=processes_of(kind),
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
    )
    module = (Varied if kind == VARIED else Noting)(**hooks)
    trainer.fit(module, ckpt_path=resume, weights_only=False if resume not in (None, "storage") else None)
    return module


def looped(kind: str, root: Path, *, resume: str | None = None, note: Path | None = None, dies: bool = False) -> Any:
    """Train by Fabric or transformers, and return the batches.

    Args:
        kind: One of :data:`SOURCES`.
        root: The folder; storage is in it.
        resume: What the training goes on from.
        note: File for the values after as many steps.
        dies: Whether the process is then killed.
    """
    from tests.formats.loops import LOOPS  # which imports transformers

    def at_step(step: int, module: torch.nn.Module) -> None:
        if step == STEPS and note is not None:
            if not note.exists():
                torch.save({"step": step, **values_of(module)}, note)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)

    return LOOPS[kind](root, STEPS + 2, resume, at_step)


def run(action: str, kind: str, folder: Path, *arguments: str) -> None:
    """Run an action in processes of its own."""
    done = run_module("tests.formats.earlier", action, kind, folder, *arguments, ranks=processes_of(kind))
    assert (done.returncode == 0) == (action != "fit_and_die"), done.stdout + done.stderr


def processes_of(kind: str) -> int:
    """Return how many processes train."""
    return 2 if kind == "two processes" else 1


def fit_and_die(kind: str, folder: Path) -> None:
    """Fit; note the values after some steps, and kill this process one step later."""
    if kind in SOURCES:
        looped(kind, folder / "run", note=folder / "values.pt", dies=True)

    def hook(module: Small) -> None:
        if module.trainer.global_step == STEPS:
            _note(module, folder / "values.pt")
        elif module.trainer.global_step > STEPS:
            os.kill(os.getpid(), signal.SIGKILL)

    fitted(kind, folder / "run", on_train_batch_end=hook)


def fit_and_save(kind: str, folder: Path) -> None:
    """Fit, save after as many steps, and note all batches."""
    if kind in SOURCES:
        torch.save(looped(kind, folder / "saved"), folder / "batches.pt")
        if "checkpoint" in SOURCES[kind]:
            (folder / "run" / f"checkpoint-{STEPS}").rename(folder / "checkpoint")
        return

    def hook(module: Small) -> None:
        if module.trainer.global_step == STEPS:
            found, noted = values_of(module), torch.load(folder / "values.pt")
            assert all(torch.equal(found[name], value) for name, value in noted.items() if name != "step")
            module.trainer.save_checkpoint(folder / "checkpoint")
            module.trainer.strategy.save_pretrained(folder / "export")  # type: ignore[attr-defined]

    fitted(kind, folder / "saved", on_train_batch_end=hook, on_train_end=partial(_note_batches, folder / "batches.pt"))


def converted(folder: Path) -> Path:
    """Convert the saved checkpoint to a universal one and to an export for Lightning, and return the folder."""
    convert_by_command(folder / "checkpoint", folder / "universal")
    assert main(["export", str(folder / "checkpoint"), str(folder / "export.ckpt"), "--to", "lightning"]) == 0
    return folder


def read(kind: str, folder: Path, *sources: str) -> None:
    """Go on from each thing that was written, and note the values with which that begins, and the batches."""
    for source in sources:
        resume = source if source == "storage" else str(folder / source)
        root = folder / ("run" if source == "storage" else f"from {source}")
        if kind in SOURCES:
            torch.save(looped(kind, root, resume=resume, note=folder / f"{source}.pt"), folder / f"{source} batches.pt")
            continue
        hooks = {
            "on_train_start": partial(_note, file=folder / f"{source}.pt"),
            "on_train_end": partial(_note_batches, folder / f"{source} batches.pt"),
        }
        fitted(kind, root, resume=resume, **hooks).trainer.strategy.close()  # type: ignore[attr-defined]


def _note_batches(file: Path, module: Noting) -> None:
    if module.trainer.is_global_zero:
        torch.save(module.batches, file)


def _note(module: Small, file: Path) -> None:
    values = values_of(module)
    if module.trainer.is_global_zero:
        torch.save({"step": module.trainer.global_step, **values}, file)


def extracted(name: str, folder: Path) -> Path:
    """Extract an archive into a folder, and return that folder."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def write(name: str, *kinds: str) -> None:
    """Write an archive of some kinds."""
    with tempfile.TemporaryDirectory() as written:
        for kind in kinds or [*KINDS, *SOURCES]:
            folder = Path(written) / kind
            (folder / "run").mkdir(parents=True)
            run("fit_and_die", kind, folder)
            run("fit_and_save", kind, folder)
            for left in (folder / "saved", folder / "run" / "kept", folder / "run" / "model"):
                shutil.rmtree(left, ignore_errors=True)
            if kind not in SOURCES:
                converted(folder)
        DATA.mkdir(exist_ok=True)
        with tarfile.open(DATA / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(written, ".")


ACTIONS: dict[str, Any] = {"fit_and_die": fit_and_die, "fit_and_save": fit_and_save, "read": read}

if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(*sys.argv[2:])
    else:
        ACTIONS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
