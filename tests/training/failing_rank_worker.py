"""Two ranks train; storage fails on rank 1.

``python -m tests.training.failing_rank_worker FOLDER OVERLAP``

First a write of state fails, then, in a second fit, that of the commit record. With ``none`` there is a fit before them
whose compressed gradients are damaged in memory; with ``backward`` one in which a wrong guess cannot be undone; with
``forward`` a loop in Fabric behind them that ends with a step in flight. Every rank writes what it met into
``rank-<n>.json``.
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


class FailOnRankOne(pl.Callback):
    """Lets rank 1 fail once, in the third step if not in another one."""

    def __init__(self, fail: Callable[[Any], None], step: int = 2) -> None:
        self.fail, self.step = fail, step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.strategy.drain()  # the step before may still be in flight
            if trainer.global_rank == 1:
                self.fail(trainer.strategy.optimizers[0])


def fail_write(optimizer: Any) -> None:
    """The next write of state fails."""
    testing.inject(optimizer.rank_state.handler._device._pipeline, fail_write_at=0)


def fail_commit(optimizer: Any) -> None:
    """The next commit record cannot be written."""
    real = os.pwrite

    def full(*_: Any) -> int:
        os.pwrite = real
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite = full  # type: ignore[assignment]


def fail_undo(optimizer: Any) -> None:
    """The state of the step before cannot be read back any more."""

    def unreadable() -> None:
        raise StorageError("rank-00001 cannot be read.", "Use another disk.")

    optimizer.rank_state.handler.rollback = unreadable


def damage_payload(optimizer: Any) -> None:
    """The next step is committed, and then nobody knows what it has sent."""
    state = optimizer.rank_state
    commit = state.handler._store.commit

    def damaging(**settings: Any) -> None:
        state.compressed._payloads.tensor[4] ^= 1  # the version, in the header of the first
        commit(**settings)

    state.handler._store.commit = damaging


def fit(
    root: Path, failure: FailOnRankOne, clip: float | None = None, compression: TopK | None = None
) -> tuple[pl.Trainer, str]:
    """Train and note the error of this rank."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        precision="bf16-mixed",
        # Gradients leave within backward.
        strategy=SmartInfinityStrategy(
            root / "storage", overlap=sys.argv[2], compression=compression, zero={"reduce_bucket_size": 4000}
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
    """Whether a step that fails on rank 1 while a loop in Fabric closes its storage leaves all parameters as before."""
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
    """All fits; what the last has left is saved."""
    root = Path(sys.argv[1])
    seen: dict[str, Any] = {}
    if sys.argv[2] == "none":
        _, seen["damage_payload"] = fit(root, FailOnRankOne(damage_payload, step=1), compression=TopK(0.05))
    if sys.argv[2] == "backward":
        # Every guess is wrong, for every step is clipped; the third would be the last for a while.
        _, seen["fail_undo"] = fit(root, FailOnRankOne(fail_undo, step=1), clip=1e-3)
    for fail in (fail_write, fail_commit):
        trainer, met = fit(root, FailOnRankOne(fail))
        handler = trainer.strategy.optimizers[0].drained_handler()
        seen[fail.__name__] = {"met": met, "generation": handler.generation, "steps": max(handler.steps.tolist())}
    if sys.argv[2] == "forward":
        seen["close_in_flight"] = close_in_flight(root)
    (root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))
    trainer.save_checkpoint(root / "rescued.ckpt")


if __name__ == "__main__":
    main()
