"""Trains on two ranks while storage fails on rank 1.

``python -m tests.training.failing_rank_worker FOLDER OVERLAP [--activations]``

In the first fit a write of state fails, in the second one the write of the commit record; with ``--activations`` a read
and a write of activations fail in two fits before. With ``none`` an earlier fit damages its compressed gradients in
memory. With ``backward`` an earlier fit cannot roll back a speculative update. With ``forward`` a loop in Fabric
follows that ends with a step in flight. Every rank writes the errors that it caught to ``rank-<n>.json``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy, StorageError, TopK
from tests.fabric.worker import _window, quiet_fabric
from tests.helpers import native_testing as testing
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.offloaded import EVERYTHING


class FailOnRankOne(pl.Callback):
    """A callback that makes rank 1 fail once, by default in the third step."""

    def __init__(self, fail: Callable[[Any], None], step: int = 2) -> None:
        self.fail, self.step = fail, step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.strategy.drain()  # the previous step may still be in flight
            if trainer.global_rank == 1:
                self.fail(trainer.strategy.optimizers[0])


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


def fit(root: Path, failure: FailOnRankOne, clip: float | None = None, **options: Any) -> tuple[pl.Trainer, str]:
    """Train and return the Trainer and the error of this rank."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        precision="bf16-mixed",
        # The small bucket makes gradients leave during backward.
        strategy=SmartInfinityStrategy(
            root / "storage", overlap=sys.argv[2], zero={"reduce_bucket_size": 4000}, **options
        ),
        max_steps=5,
        gradient_clip_val=clip,
        callbacks=[failure],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    met = "nothing"
    try:
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed")))
    except SmartInfinityError as error:
        met = f"{type(error).__name__}: {error}"
    return trainer, met


def close_in_flight(root: Path) -> bool:
    """Tell whether a step that fails on rank 1 while a Fabric loop closes leaves all parameters as before."""
    recipe = Recipe()
    fabric = quiet_fabric(root / "closed", devices=2, precision="32-true", options={"overlap": "forward"})
    module = recipe.build_model()
    model, optimizer = fabric.setup(module, recipe.build_optimizer(list(module.named_parameters())))
    values: list[list[torch.Tensor]] = []
    for step in range(2):
        _window(fabric, model, recipe, step)
        if step == 1:
            fabric.strategy.drain()
            values.append(_gathered(module))
            if fabric.global_rank == 1:
                fail_write(optimizer.engine.optimizer)
        optimizer.step()
    fabric.strategy.close()
    values.append(_gathered(module))
    return all(torch.equal(before, after) for before, after in zip(*values, strict=True))


def _gathered(module: torch.nn.Module) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return [param.detach().clone() for param in module.parameters()]


def main() -> None:
    """Run all fits, and save what the last one leaves."""
    root = Path(sys.argv[1])
    seen: dict[str, Any] = {}
    if sys.argv[2] == "none":
        _, seen["damage_payload"] = fit(root, FailOnRankOne(damage_payload, step=1), compression=TopK(0.05))
    if sys.argv[2] == "backward":
        # Clipping makes every speculative update wrong. After the third one speculation pauses.
        _, seen["fail_roll_back"] = fit(root, FailOnRankOne(fail_roll_back, step=1), clip=1e-3)
    of_activations = (fail_read_of_activations, fail_write_of_activations) if "--activations" in sys.argv else ()
    for fail in (*of_activations, fail_write, fail_commit):
        trainer, met = fit(
            root, FailOnRankOne(fail), activations=EVERYTHING if "activations" in fail.__name__ else None
        )
        handler = trainer.strategy.optimizers[0].update.drained_handler()
        seen[fail.__name__] = {"met": met, "generation": handler.generation, "steps": max(handler.steps.tolist())}
    if sys.argv[2] == "forward":
        seen["close_in_flight"] = close_in_flight(root)
    (root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))
    trainer.save_checkpoint(root / "rescued.ckpt")


if __name__ == "__main__":
    main()
