"""Trains while values are written and read from outside, in this process or on ranks.

:data:`EDITS` holds, step by step, an edit with the strategy and the same edit in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from lightning.pytorch.callbacks import LambdaCallback

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy, TransferConfig
from tests.helpers import reference
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

SCALE = 2.0**10
NAMES = ("tokens.weight", "blocks.0.up.weight", "odd.scale", "odd.gain", "odd.shift")
# Adam with a small eps would turn 16-bit rounding noise into full steps.
EPS = {"32-true": 1e-4, "bf16-mixed": 1e-2, "bf16-true": 1e-2, "16-mixed": 1e-2}


def recipe_for(precision: str) -> Recipe:
    """Return a recipe with parameters of all sizes, one of them frozen."""
    return Recipe(precision=precision, odd=True, frozen=True, eps=EPS[precision], max_steps=len(EDITS) + 1)


@dataclass
class Seen:
    """The losses and masters of a training and the values read from it."""

    losses: list[float] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    read: dict[str, torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Edit:
    """An edit before a step or, if ``graded``, between its backward and its update."""

    ours: Callable[[dict[str, Any], Any], None]
    torch: Callable[[reference.Live], None]
    graded: bool = False


def gathered(params: dict[str, Any], optimizer: Any) -> None:
    """Gather all parameters and write to some."""
    with deepspeed.zero.GatheredParameters(list(params.values()), modifier_rank=0), torch.no_grad():
        # Rank 0's values count.
        if torch.distributed.get_rank() == 0:
            params["tokens.weight"][3:7] *= 0.5
            params["odd.scale"].fill_(1.25)
            params["odd.gain"].fill_(1.25)
            params["positions.weight"].zero_()


def gathered_in_torch(live: reference.Live) -> None:
    for name, rows in (("tokens.weight", slice(3, 7)), ("odd.scale", ...), ("odd.gain", ...)):
        written = live.params[name][rows] * 0.5 if name == "tokens.weight" else torch.tensor(1.25)
        live.params[name][rows] = written
        live.masters[name][rows] = live.params[name][rows].float()
    live.params["positions.weight"].zero_()


def only_gathered(params: dict[str, Any], optimizer: Any) -> None:
    """Gather all parameters for a write, and write nothing."""
    with deepspeed.zero.GatheredParameters(list(params.values()), modifier_rank=0):
        pass


def master_set(params: dict[str, Any], optimizer: Any) -> None:
    """Set full and local masters."""
    for name in NAMES:
        param = params[name]
        if name == "odd.shift":
            safe_set_local_fp32_param(param, torch.full_like(safe_get_local_fp32_param(param), 0.3))
        else:
            safe_set_full_fp32_param(param, torch.full(tuple(param.ds_shape), 0.1001))


def master_set_in_torch(live: reference.Live) -> None:
    for name in NAMES:
        live.masters[name].fill_(0.3 if name == "odd.shift" else 0.1001)
        live.params[name].copy_(live.masters[name])


def moments_set(params: dict[str, Any], optimizer: Any) -> None:
    """Halve the first moments of some parameters and double the second."""
    for name in NAMES:
        param = params[name]
        safe_set_full_optimizer_state(param, safe_get_full_optimizer_state(param, "exp_avg") * 0.5, "exp_avg")
        second = safe_get_local_optimizer_state(param, "exp_avg_sq") * 2
        safe_set_local_optimizer_state(param, second, "exp_avg_sq")


def moments_set_in_torch(live: reference.Live) -> None:
    for name in NAMES:
        live.optimizer.state[live.masters[name]]["exp_avg"] *= 0.5
        live.optimizer.state[live.masters[name]]["exp_avg_sq"] *= 2


def gradient_set(params: dict[str, Any], optimizer: Any) -> None:
    """Change gradients with all three calls."""
    tokens, up, scale, gain, shift = (params[name] for name in NAMES)
    safe_set_full_grad(tokens, safe_get_full_grad(tokens) * 0.5)
    safe_set_local_grad(up, safe_get_local_grad(up) * 3)
    safe_update_full_grad_vectorized([scale, gain, shift], lambda gradient, param: gradient * 2)


def gradient_set_in_torch(live: reference.Live) -> None:
    for name, factor in zip(NAMES, (0.5, 3, 2, 2, 2), strict=True):
        live.masters[name].grad *= factor  # type: ignore[operator]


def refreshed(params: dict[str, Any], optimizer: Any) -> None:
    """Copy the parameters to the masters."""
    optimizer.refresh_fp32_params()


def refreshed_in_torch(live: reference.Live) -> None:
    for name, master in live.masters.items():
        master.copy_(live.params[name])


def nothing_in_torch(live: reference.Live) -> None:
    """Change nothing, as an edit that only gathers."""


EDITS = [
    Edit(lambda params, optimizer: None, nothing_in_torch),
    Edit(gathered, gathered_in_torch),
    Edit(only_gathered, nothing_in_torch),
    Edit(moments_set, moments_set_in_torch),
    Edit(gradient_set, gradient_set_in_torch, graded=True),
    Edit(refreshed, refreshed_in_torch),
    Edit(master_set, master_set_in_torch),
]
"""The list holds one edit for each step, beginning with the first."""


def read_all(params: dict[str, Any], prefix: str) -> dict[str, torch.Tensor | None]:
    """Return what the safe_get_full_* functions give for some parameters."""
    seen: dict[str, torch.Tensor | None] = {}
    for name in NAMES:
        seen[f"{prefix} {name} master"] = safe_get_full_fp32_param(params[name])
        seen[f"{prefix} {name} grad"] = safe_get_full_grad(params[name])
        for key in ("exp_avg", "exp_avg_sq"):
            seen[f"{prefix} {name} {key}"] = safe_get_full_optimizer_state(params[name], key)
    return {key: None if value is None else value.detach().cpu().clone() for key, value in seen.items()}


class Editor(pl.Callback):
    """A callback that applies the edits and reads before and after each, and between backward and update."""

    def __init__(self) -> None:
        self.seen = Seen()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self._read(pl_module, f"before {step}")
        if step < len(EDITS) and not EDITS[step].graded:
            self._edit(trainer, pl_module, step)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step
        if step < len(EDITS) and EDITS[step].graded:
            self._read(pl_module, f"backward {step}")
            self._edit(trainer, pl_module, step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        optimizer: Any = trainer.strategy.optimizers[0]
        for name, param in pl_module.model.named_parameters():
            if param.requires_grad:
                self.seen.masters[name] = optimizer.get_full_hp_param(param).cpu().clone()

    def _edit(self, trainer: pl.Trainer, pl_module: Any, step: int) -> None:
        EDITS[step].ours(dict(pl_module.model.named_parameters()), trainer.strategy.optimizers[0])
        self._read(pl_module, f"edited {step}")

    def _read(self, pl_module: Any, when: str) -> None:
        self.seen.read |= read_all(dict(pl_module.model.named_parameters()), when)


def run(precision: str, out: Path, *, devices: int = 1) -> Seen:
    """Train with every edit and return what was read."""
    editor = Editor()
    # Some parameters lie above the persistence threshold, so that they are gathered for a write, and some below. The
    # smallest tasklets make parameters share tasklets or spread over several.
    strategy = SmartInfinityStrategy(
        out / "storage",
        transfer=TransferConfig(tasklet_bytes=64 * 1024),
        zero={"stage3_param_persistence_threshold": 64},
        loss_scale=SCALE,
    )
    recipe = recipe_for(precision)
    module = LitTiny(recipe)
    settings: dict[str, Any] = {"precision": precision, "max_steps": recipe.max_steps, "callbacks": [editor]}
    quiet_trainer(out, strategy, devices=devices, **settings).fit(module)
    # Training is over, and its state still exists.
    editor.seen.read |= read_all(dict(module.model.named_parameters()), "after")
    strategy.close()
    editor.seen.losses = module.losses
    return editor.seen


def expected(precision: str, *, world_size: int = 1) -> Seen:
    """Train with the same edits in plain torch."""
    seen = Seen()
    # In fp16 DeepSpeed's gradients are those of the scaled loss.
    scale = SCALE if precision.startswith("16") else 1.0

    def read(when: str, live: reference.Live) -> None:
        for name in NAMES:
            master = live.masters[name]
            state = live.optimizer.state.get(master, {})
            seen.read[f"{when} {name} master"] = master.detach().clone()
            seen.read[f"{when} {name} grad"] = None if master.grad is None else master.grad.clone() * scale
            for key in ("exp_avg", "exp_avg_sq"):
                seen.read[f"{when} {name} {key}"] = state.get(key, torch.zeros_like(master)).clone()

    def before_step(step: int, live: reference.Live) -> None:
        lives.append(live)
        read(f"before {step}", live)
        if step < len(EDITS) and not EDITS[step].graded:
            EDITS[step].torch(live)
            read(f"edited {step}", live)

    def before_update(step: int, live: reference.Live) -> None:
        if step < len(EDITS) and EDITS[step].graded:
            read(f"backward {step}", live)
            EDITS[step].torch(live)
            read(f"edited {step}", live)

    lives: list[reference.Live] = []
    result = reference.train(
        recipe_for(precision),
        world_size=world_size,
        loss_scale=SCALE,
        before_step=before_step,
        before_update=before_update,
    )
    read("after", lives[0])
    seen.losses, seen.masters = result.losses, result.masters
    return seen


def load_full(out: Path) -> dict[str, Any]:
    """Load full fp32 weights on two processes, and make a mistake on one of them.

    Returns:
        The file's weights, masters, parameters and moments when training starts, and this rank's error of a value that
        has the wrong size on rank 1 alone.
    """
    module, path = LitTiny(recipe_for("bf16-mixed")), out / "full.ckpt"
    weights = {name: value * 1.2345 for name, value in module.state_dict().items()}
    seen: dict[str, Any] = {"weights": weights, "masters": {}, "params": {}, "moments": {}}

    def note(*_: Any) -> None:
        for name, param in module.named_parameters():
            seen["masters"][name] = safe_get_full_fp32_param(param)
            if param.requires_grad:
                seen["moments"][name] = safe_get_full_optimizer_state(param, "exp_avg")
            with deepspeed.zero.GatheredParameters(param):
                seen["params"][name] = param.detach().clone()

    def misuse(*_: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            safe_set_full_fp32_param(module.model.norm.weight, torch.zeros(32 + module.global_rank))
        seen["refused"] = str(caught.value)

    callback = LambdaCallback(on_train_start=note, on_train_batch_start=misuse)
    strategy = SmartInfinityStrategy(out / "storage", load_full_weights=True)
    trainer = quiet_trainer(out, strategy, devices=2, max_steps=1, callbacks=[callback])
    if trainer.global_rank == 0:
        counts = {"epoch": 0, "global_step": 0, "lr_schedulers": []}
        torch.save({"state_dict": weights, "pytorch-lightning_version": pl.__version__, **counts}, path)
    trainer.fit(module, ckpt_path=str(path))
    strategy.close()
    return seen


def on_each_rank(out: Path, *precisions: str) -> dict[str, Any]:
    """Return what a rank has read with the edits in each precision, and with full weights."""
    return {precision: run(precision, out, devices=2) for precision in precisions} | {"full": load_full(out)}
