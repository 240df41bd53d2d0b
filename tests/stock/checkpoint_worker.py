"""Saves checkpoints with stock DeepSpeed: ``python -m tests.stock.checkpoint_worker FOLDER DEVICES``.

A run of six steps for each of ``KINDS`` saves ``<kind>.ckpt`` after the third step. DeepSpeed's engine alone, without
Lightning, also saves ``<kind>.engine`` then. Rank 0 writes its losses to ``<kind>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.accelerator import get_accelerator

from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.stock.systems import Hook, StockOnCpu

SAVE_AT, NUM_STEPS = 3, 6
KINDS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "fp32": (Recipe(precision="32-true", groups=True, scheduler="step", max_steps=NUM_STEPS), {}),
    "bf16-offload": (
        Recipe(precision="bf16-mixed", groups=True, scheduler="step", max_steps=NUM_STEPS),
        {"offload_optimizer": True},
    ),
    # The loss scale is halved at the first step, which is skipped.
    "fp16": (
        Recipe(precision="16-mixed", max_steps=NUM_STEPS),
        {"initial_scale_power": 19, "hysteresis": 1, "offload_optimizer": True},
    ),
    # There are no groups, since stock loses all but one of them with Adagrad.
    "adagrad": (
        Recipe(
            optimizer="Adagrad",
            optimizer_kwargs={"lr_decay": 0.1, "initial_accumulator_value": 0.01},
            max_steps=NUM_STEPS,
        ),
        {},
    ),
    "sgd": (
        Recipe(
            precision="bf16-mixed",
            optimizer="SGD",
            lr=0.1,
            eps=None,
            groups=True,
            optimizer_kwargs={"momentum": 0.9},
            max_steps=NUM_STEPS,
        ),
        {},
    ),
    "sgd without momentum": (Recipe(optimizer="SGD", lr=0.1, eps=None, max_steps=NUM_STEPS), {}),
}


def _save_twice(trainer: Any, path: Path) -> None:
    trainer.save_checkpoint(path.with_suffix(".ckpt"))
    trainer.strategy.deepspeed_engine.save_checkpoint(path.with_suffix(".engine"))


def save(kind: str, folder: Path, devices: int) -> None:
    recipe, settings = KINDS[kind]
    strategy = StockOnCpu(
        stage=3, zero_allow_untested_optimizer=True, reduce_bucket_size=1_000_000, sub_group_size=9000, **settings
    )
    assert isinstance(strategy.config, dict)
    strategy.config["zero_force_ds_cpu_optimizer"] = False
    hook = Hook(SAVE_AT, lambda trainer: _save_twice(trainer, folder / kind))
    module = LitTiny(recipe)
    trainer = quiet_trainer(
        folder, strategy, devices=devices, precision=recipe.precision, max_steps=NUM_STEPS, callbacks=[hook]
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        (folder / f"{kind}.json").write_text(json.dumps(module.losses))


def main() -> None:
    # torch has fp16 kernels for every CPU, but DeepSpeed asks for oneDNN's.
    get_accelerator().is_fp16_supported = lambda: True
    for kind in KINDS:
        save(kind, Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
