"""Trains, or saves, on ranks of which one fails."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy, StorageError, TopK
from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.storage.folders import staging_folder
from lightning_smartinfinity.zero3.checkpoints.formats import tensor_file
from tests.fabric.worker import quiet_fabric
from tests.helpers import native_testing as testing
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.trainers import fit, quiet_trainer
from tests.stock.systems import Hook
from tests.training.asynchronous_worker import contents


def on_rank_one(fail: Callable[[Any], None], step: int = 2) -> Hook:
    """Return a callback that makes rank 1 fail once, by default in the third step."""

    def fail_there(trainer: Any) -> None:
        trainer.strategy.drain()  # the previous step may still be in flight
        if trainer.global_rank == 1:
            fail(trainer.strategy.optimizers[0])

    return Hook(step, fail_there)


def fail_write(optimizer: Any) -> None:
    """Make the next write of state fail."""
    testing.inject(optimizer.rank_state.handler._device._pipeline, fail_write_at=0)


def fail_commit(optimizer: Any) -> None:
    """Make the next write of the commit record fail."""
    real = os.pwrite

    def full(descriptor: int, *written: Any) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("commit.bin"):
            return real(descriptor, *written)
        os.pwrite = real
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite = full  # type: ignore[assignment]


def fail_read_of_activations(optimizer: Any) -> None:
    """Make the next read of activations fail."""
    testing.inject(optimizer.rank_state.activations._store.files.tensors.core, fail_read_at=0)


def fail_write_of_activations(optimizer: Any) -> None:
    """Make the next write of activations fail."""
    testing.inject(optimizer.rank_state.activations._store.files.tensors.core, fail_write_at=0, errno=errno.ENOSPC)


def fail_roll_back(optimizer: Any) -> None:
    """Make a rollback fail because the previous state is unreadable."""

    def unreadable() -> None:
        raise StorageError("rank-00001 cannot be read.", "Use another disk.")

    optimizer.rank_state.handler.roll_back = unreadable


def damage_payload(optimizer: Any) -> None:
    """Corrupt the payload of the next step just before the step is committed."""
    state = optimizer.rank_state
    commit = state.handler._store.commit

    def damaging(**settings: Any) -> None:
        state.compressed._payloads.tensor[4] ^= 1  # flips a bit of the version in the first header
        commit(**settings)

    state.handler._store.commit = damaging


def fit_failing(
    root: Path, overlap: str, failure: Hook, clip: float | None = None, **options: Any
) -> tuple[pl.Trainer, str]:
    """Train and return the Trainer and the error of this rank."""
    zero = {"reduce_bucket_size": 4000}  # gradients leave during backward
    strategy = SmartInfinityStrategy(root / "storage", overlap=overlap, zero=zero, **options)
    trainer = quiet_trainer(root, strategy, devices=2, max_steps=5, gradient_clip_val=clip, callbacks=[failure])
    met = "nothing"
    try:
        trainer.fit(LitTiny(RECIPE))
    except SmartInfinityError as error:
        met = f"{type(error).__name__}: {error}"
    return trainer, met


def close_in_flight(root: Path) -> bool:
    """Tell whether a step that fails on rank 1 while a Fabric loop closes leaves all parameters as before."""
    fabric = quiet_fabric(root / "closed", devices=2, precision="32-true", options={"overlap": "forward"})
    module = Recipe().build_model()
    model, optimizer = fabric.setup(module, Recipe().build_optimizer(list(module.named_parameters())))
    fabric.backward(model(Recipe().batch(0, fabric.global_rank, fabric.world_size)), model=model)
    before = _gathered(module)
    if fabric.global_rank == 1:
        fail_write(optimizer.engine.optimizer)
    optimizer.step()
    fabric.strategy.close()
    return all(map(torch.equal, before, _gathered(module)))


def _gathered(module: torch.nn.Module) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return [param.detach().clone() for param in module.parameters()]


def steps(root: Path, overlap: str, *activations: str) -> dict[str, Any]:
    """Run all fits, save what the last one leaves, and return the errors that this rank met.

    In the first fit a write of state fails, in the second one the write of the commit record; with activations a read
    and a write of these fail in two fits before. With ``none`` an earlier fit damages its compressed gradients in
    memory. With ``backward`` an earlier fit cannot roll back a speculative update. With ``forward`` a loop in Fabric
    follows that ends with a step in flight.
    """
    seen: dict[str, Any] = {}
    if overlap == "none":
        failure = on_rank_one(damage_payload, step=1)
        _, seen["damage_payload"] = fit_failing(root, overlap, failure, compression=TopK(0.05))
    if overlap == "backward":
        # Clipping makes every speculative update wrong. After the third one speculation pauses.
        _, seen["fail_roll_back"] = fit_failing(root, overlap, on_rank_one(fail_roll_back, step=1), clip=1e-3)
    of_activations = (fail_read_of_activations, fail_write_of_activations) if activations else ()
    for fail in (*of_activations, fail_write, fail_commit):
        moved = EVERYTHING if fail in of_activations else None
        trainer, met = fit_failing(root, overlap, on_rank_one(fail), activations=moved)
        handler = trainer.strategy.optimizers[0].update.drained_handler()
        seen[fail.__name__] = {"met": met, "generation": handler.generation, "steps": max(handler.steps.tolist())}
    trainer.save_checkpoint(root / "rescued.ckpt")
    if overlap == "forward":
        seen["close_in_flight"] = close_in_flight(root)
    return seen


RECIPE = Recipe(precision="bf16-mixed", max_steps=4)
CODEC = TopK(0.05)
TRANSFER = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}


def die_in_writing() -> None:
    """Let rank 1 be killed when it writes the fifth tensor of a save."""
    write, calls = tensor_file.TensorStream.write, itertools.count()

    def dying(*args: Any) -> Any:
        if dist.get_rank() == 1 and next(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    tensor_file.TensorStream.write = dying  # type: ignore[method-assign]


def full_at(name: str) -> AbstractContextManager[object]:
    """Let a disk be full when the file of this name is written."""
    write = Path.write_text

    def refused(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **kwargs)

    return mock.patch.object(Path, "write_text", refused)


FAULTS: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "latest": lambda _: full_at("latest"),
    NOTE_NAME: lambda _: full_at(NOTE_NAME),
    "another process": lambda path: staging_folder.locked(path / ".saving", path),
}


def save_with_faults(trainer: Any, path: Path) -> dict[str, Any]:
    """Save with each fault on rank 0; return what this rank met, and whether the checkpoint is as it was."""
    before, seen = contents(path), dict[str, Any]()
    for name, fault in FAULTS.items():
        trainer.strategy.barrier()
        with fault(path) if trainer.global_rank == 0 else nullcontext():
            trainer.strategy.barrier()
            met = "nothing"
            try:
                trainer.save_checkpoint(path)
            except SmartInfinityError as error:
                met = f"{type(error).__name__}: {error}"
            trainer.strategy.barrier()
        trainer.strategy.barrier()
        seen[name] = {"met": met, "same": contents(path) == before}
    trainer.strategy.barrier()
    trainer.save_checkpoint(path)
    return seen


def saves(folder: Path, *die: str) -> dict[str, Any]:
    """Save after the first step, copy that to ``first.ckpt``, and save over it; return what this rank met.

    Rank 1 may die in the save after the second step. Else the saves after the training fail on rank 0: the disk is full
    when the last files are written, or another process saves there.
    """
    path = folder / "last.ckpt"

    def save(trainer: Any) -> None:
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            shutil.copytree(path, folder / "first.ckpt")

    def save_and_die(trainer: Any) -> None:
        die_in_writing()
        trainer.save_checkpoint(path)

    strategy = SmartInfinityStrategy(folder / "storage", compression=CODEC, transfer=TRANSFER)
    hooks = [Hook(1, save), *(Hook(2, save_and_die) for _ in die)]
    return save_with_faults(fit(LitTiny(RECIPE), folder, strategy, devices=2, max_steps=4, callbacks=hooks), path)
