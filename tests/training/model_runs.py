"""Trains hard modules with smart_infinity and compares them with plain torch."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.hard_modules import (
    Adapted,
    Balanced,
    Case,
    Checkpointed,
    Containers,
    HardModule,
    Large,
    Layers,
    Meta,
    Nested,
    Outputs,
    Penalty,
    Reused,
    Shapes,
    SometimesUsed,
    Teacher,
    Thawing,
    TiedThrice,
    Trained,
    TwoBackwards,
    UsedLate,
    train_plainly,
)
from tests.helpers.trainers import quiet_trainer

# In 16 bit a difference in the last bit of an update sometimes changes how a parameter is rounded.
IN_16_BIT = {"masters": 5e-3}
# The bucket is smaller than the weights, so that they leave before the next bias arrives.
SMALL_BUCKET = {"reduce_bucket_size": 16}


def keep_products() -> Any:
    """Return a selective checkpointing policy that keeps matrix products and recomputes everything else."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


STRUCTURES = {
    "a module used three times": Case(Reused, zero=SMALL_BUCKET),
    "a module in two parents": Case(Nested),
    "one weight in three places": Case(TiedThrice),
    "tensors of odd sizes and not contiguous": Case(partial(Shapes, scalars=True), zero={"sub_group_size": 40}),
    "tensors without a dimension, in bf16": Case(partial(Shapes, scalars=True), precision="bf16-mixed", **IN_16_BIT),
    "tensors without elements": Case(partial(Shapes, empty=True)),
    "LSTM, attention, parametrizations, padding, buffers": Case(Layers, masters=1e-4),
    "parameters in containers": Case(Containers),
    "nested outputs": Case(Outputs),
    "a frozen base with adapters": Case(Adapted, precision="bf16-true", **IN_16_BIT),
    "adapters, and an empty parameter group": Case(Adapted, clip=0.5, accumulate=2),
    "a teacher without gradient": Case(Teacher),
    "a tensor larger than ring and sub-group": Case(
        Large,
        zero={"sub_group_size": 5_000, "reduce_bucket_size": 1_000},
        transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 4},
    ),
}
_REENTRANT = partial(Checkpointed, use_reentrant=True)
CHECKPOINTS = {
    "reentrant, one bucket": Case(partial(_REENTRANT, outside=False), clip=0.5),
    "reentrant, small buckets": Case(_REENTRANT, clip=0.5, zero=SMALL_BUCKET),
    "reentrant, accumulating": Case(_REENTRANT, accumulate=3, clip=0.5, zero={"reduce_bucket_size": 100}),
    "reentrant, bf16": Case(_REENTRANT, precision="bf16-mixed", clip=0.5, zero=SMALL_BUCKET, **IN_16_BIT),
    "reentrant, bf16, accumulating": Case(_REENTRANT, precision="bf16-mixed", accumulate=2, **IN_16_BIT),
    "not reentrant": Case(partial(Checkpointed, use_reentrant=False), accumulate=2, zero=SMALL_BUCKET),
    "selective": Case(partial(Checkpointed, use_reentrant=False, context_fn=keep_products), zero=SMALL_BUCKET),
}
UNUSED = {
    "in fp32": Case(SometimesUsed, steps=5),
    "by another module": Case(UsedLate, steps=4),
    "by another module, in bf16 beside a batch norm": Case(UsedLate, steps=4, precision="bf16-mixed", **IN_16_BIT),
    "because they are frozen then": Case(Thawing),
    "in bf16": Case(SometimesUsed, steps=5, precision="bf16-mixed", **IN_16_BIT),
    "in fp16": Case(SometimesUsed, steps=5, precision="16-mixed", **IN_16_BIT),
    "by one micro-batch": Case(partial(SometimesUsed, micro_batches=2), steps=5, accumulate=2),
    "by one micro-batch in bf16": Case(
        partial(SometimesUsed, micro_batches=2), steps=5, accumulate=2, precision="bf16-true", **IN_16_BIT
    ),
}
GRAPHS = {
    "one forward, two backwards": Case(TwoBackwards),
    "a gradient penalty": Case(Penalty),
    "a gradient penalty in bf16": Case(Penalty, precision="bf16-mixed", **IN_16_BIT),
    "losses balanced by their slopes": Case(Balanced, accumulate=2),
    "a step of gradient descent inside the loss": Case(Meta),
}
CASES: dict[str, Case] = {**STRUCTURES, **CHECKPOINTS, **UNUSED, **GRAPHS}


# Gather and release every parameter around its modules. DeepSpeed would keep parameters this small in memory.
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}


class Collect(pl.Callback):
    """A callback that collects masters and update counts by parameter name when training ends."""

    def __init__(self) -> None:
        self.masters: dict[str, torch.Tensor] = {}
        self.steps: dict[str, int] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer: Any = trainer.strategy.optimizers[0]
        names = (parameter.name for parameter in optimizer.partition.layout.parameters)
        counts = dict(zip(names, optimizer.update.drained_handler().steps, strict=True))
        for name, param in pl_module.named_parameters():
            if param.requires_grad:
                self.masters[name] = optimizer.get_full_hp_param(param).cpu().clone()
                self.steps[name] = int(counts.get(name, 0))


def trainer_for(case: Case, root: Path, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """Return a quiet Trainer with the case's settings."""
    options = {"loss_scale": 2.0**10} if case.precision.startswith("16") else {}
    strategy = SmartInfinityStrategy(
        root / "storage", transfer=TransferConfig(**case.transfer), zero={**NOTHING_PERSISTS, **case.zero}, **options
    )
    defaults: dict[str, Any] = {
        "precision": case.precision,
        "max_steps": case.steps,
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": case.clip,
    }
    return quiet_trainer(root, strategy, callbacks=list(callbacks), **{**defaults, **settings})


def train_near_storage(
    case: Case, root: Path, *, module: HardModule | None = None, ckpt_path: str | None = None, **settings: Any
) -> Trained:
    """Train the case with smart_infinity.

    Args:
        case: The case to train.
        root: Folder for all files.
        module: Replaces the case's own module.
        ckpt_path: Checkpoint to resume from.
        **settings: Trainer settings that replace the case's.
    """
    module = module if module is not None else case.module()
    collect = Collect()
    trainer = trainer_for(case, root, collect, **settings)
    trainer.fit(module, ckpt_path=ckpt_path)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return Trained(module.seen, collect.masters, collect.steps)


def assert_trains_like_torch(case: Case, trained: Trained, *, world_size: int = 1) -> None:
    """Assert that losses, masters and update counts equal those of plain torch."""
    expected = train_plainly(case, world_size=world_size)
    torch.testing.assert_close(
        torch.tensor(trained.losses), torch.tensor(expected.losses), atol=case.masters / 4, rtol=case.masters / 4
    )
    assert trained.masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        torch.testing.assert_close(trained.masters[name], master, atol=case.masters, rtol=0, msg=name)
    # torch also counts updates of parameters without elements.
    held = {name for name, master in expected.masters.items() if master.numel()}
    assert (
        {name: trained.steps[name] for name in held} == {name: expected.steps[name] for name in held}
        and all(math.isfinite(loss) for loss in trained.losses)
        and len(set(trained.losses)) > 1
    )


def on_each_rank(root: Path, *names: str) -> dict[str, Trained]:
    """Train named cases one after the other on two ranks."""
    return {
        name: train_near_storage(CASES[name], root / f"case-{number}", devices=2) for number, name in enumerate(names)
    }
