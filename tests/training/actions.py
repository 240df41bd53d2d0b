"""What callbacks do to a training in tests of the step: actions, which return what they read, and who calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad

from tests.helpers import native_testing as testing

Action = Callable[[pl.Trainer, Any], object]


def does(**hooks: Action) -> pl.Callback:
    """Return a callback that calls a function at each named hook, with the Trainer and the module."""

    def method(action: Action) -> Callable[..., None]:
        def hook(self: pl.Callback, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            action(trainer, module)

        return hook

    # Hooks of the class, as those of a user: which ones a callback has decides what a training may do.
    return type("Does", (pl.Callback,), {name: method(action) for name, action in hooks.items()})()  # type: ignore[no-any-return]


def fail_at(step: int, **faults: int) -> pl.Callback:
    """Return a callback that makes transfers of one step's update fail."""

    def arm(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == step:
            handler = trainer.strategy.optimizers[0].rank_state.handler
            handler.finish()
            testing.inject(handler._device._pipeline, max_delay_us=1000, **faults)

    return does(on_train_batch_start=arm)


def read_state(trainer: pl.Trainer, module: Any) -> list[float]:
    trained = (param for param in module.parameters() if param.requires_grad)
    return [float(safe_get_full_fp32_param(param).double().sum()) for param in trained]


def write_state(trainer: pl.Trainer, module: Any) -> None:
    value = safe_get_full_fp32_param(module.model.norm.weight)
    safe_set_full_fp32_param(module.model.norm.weight, value + 0.25)


def gather(trainer: pl.Trainer, module: Any) -> list[float]:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return [float(param.detach().double().sum()) for param in module.parameters()]


def write_gathered(trainer: pl.Trainer, module: Any) -> None:
    param = module.model.blocks[0].up.weight
    with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
        param.mul_(0.5)


def write_data(trainer: pl.Trainer, module: Any) -> None:
    module.model.norm.weight.data.mul_(0.5)  # which stays whole after backward


def forward(trainer: pl.Trainer, module: Any) -> float:
    with torch.no_grad():
        return float(module.model(module.recipe.batch(0)))


def halve_gradients(trainer: pl.Trainer, module: Any) -> None:
    for param in module.parameters():
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, 0.5 * gradient)


def halve_rate(trainer: pl.Trainer, module: Any) -> None:
    for group in trainer.strategy.optimizers[0].param_groups:
        group["lr"] *= 0.5


def zero_grad(trainer: pl.Trainer, module: Any) -> None:
    trainer.strategy.optimizers[0].zero_grad()


def refresh_masters(trainer: pl.Trainer, module: Any) -> None:
    trainer.strategy.optimizers[0].refresh_fp32_params()


def save(trainer: pl.Trainer, module: Any) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def drain(trainer: pl.Trainer, module: Any) -> None:
    trainer.strategy.drain()  # type: ignore[attr-defined]
