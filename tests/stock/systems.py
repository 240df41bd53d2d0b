"""The three systems that run :mod:`tests.stock.situations`, and makers of their Trainers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity.zero3.setup.environment import forbid_jit_builds
from tests.helpers.trainers import quiet_trainer

OURS = "smart_infinity"


def stock_fails(reason: str, *values: object) -> object:
    """Return a parameter set for stock that is documented to fail an assertion.

    The mark is strict: if stock passes, the test fails, since the reason no longer holds.
    """
    fails = pytest.mark.xfail(reason=f"stock: {reason}", strict=True, raises=AssertionError)
    return pytest.param("stock", *values, marks=fails)


# Gather and release every parameter around its modules, however small.
_NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}


class StockOnCpu(DeepSpeedStrategy):
    """Lightning's strategy with the changes that it needs to start on a CPU."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)

    def setup_environment(self) -> None:
        os.environ["LOCAL_SIZE"] = str(self.num_processes)
        forbid_jit_builds()  # an op for collectives in shared memory, which changes no result
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def _stock(zero: dict[str, Any]) -> Any:
    """Return stock's strategy with optimizer state in memory and torch's AdamW."""
    strategy = StockOnCpu(stage=3, offload_optimizer=True, zero_allow_untested_optimizer=True)
    assert isinstance(strategy.config, dict)
    strategy.config["zero_force_ds_cpu_optimizer"] = False
    strategy.config["zero_optimization"] |= {**_NOTHING_PERSISTS, **zero}
    return strategy


def maker(system: str, root: Path, devices: int) -> Callable[..., pl.Trainer]:
    """Return a maker of Trainers that takes ``quiet_trainer``'s settings and ``zero`` with those of ZeRO-3."""

    def make(*, zero: dict[str, Any] | None = None, **settings: Any) -> pl.Trainer:
        strategy: Any = "auto"
        if system == "stock":
            strategy = _stock(zero or {})
        elif system == OURS:
            from lightning_smartinfinity import SmartInfinityStrategy

            # Like stock's, a step has ended when it returns: what a situation does then meets no update.
            strategy = SmartInfinityStrategy(
                root / "storage",
                overlap="none",
                zero={**_NOTHING_PERSISTS, **(zero or {})},
                transfer={"keep": False},
            )
        short = {"num_sanity_val_steps": 0, "limit_val_batches": 2, "use_distributed_sampler": False}
        return quiet_trainer(root, strategy, **{"precision": "32-true", "devices": devices, **short, **settings})

    return make


class Hook(pl.Callback):
    """A callback that calls a function once, after a given number of steps."""

    def __init__(self, step: int, action: Callable[[pl.Trainer], object]) -> None:
        self.step, self.action, self.is_done = step, action, False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.is_done:
            self.is_done = True
            self.action(trainer)


def masters(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, torch.Tensor]:
    """Return the fp32 weights by name."""
    optimizer: Any = trainer.strategy.optimizers[0]
    full = getattr(optimizer, "get_full_hp_param", lambda param: param)
    return {name: full(param).detach().clone() for name, param in module.named_parameters()}
