"""Trains a recipe with plain torch: the reference that smart_infinity must equal.

In 16 bit the reference is the 16-bit model with fp32 masters started from it, and gradients accumulated in the same
dtype as ours (fp32 when there are several micro-batches).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.helpers.models import Recipe

_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


@dataclass
class Result:
    """Losses of every micro-batch (of rank 0), the final masters by name, the mean loss of every validation."""

    losses: list[float]
    masters: dict[str, torch.Tensor]
    validated: list[float] = field(default_factory=list)


def train(
    recipe: Recipe,
    *,
    world_size: int = 1,
    skipped: Collection[int] = (),
    accumulate_in: str = "fp32",
    before_update: Callable[[int, dict[str, nn.Parameter]], object] | None = None,
) -> Result:
    """Train on one process what ``world_size`` ranks would train together.

    fp16 uses a static loss scale, with which no step may overflow. The ``skipped`` steps compute losses but update
    nothing, as when a loss scaler skips them. With ``accumulate_in="parameters"`` the gradients of a window are added
    in the parameters' dtype. ``before_update`` is called with the masters behind a step's last backward.
    """
    dtype = _DTYPES[recipe.precision.split("-")[0]]
    scale = 2.0**10 if dtype is torch.float16 else 1.0
    model = recipe.build_model().to(dtype)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = recipe.build_optimizer(list(zip(names, masters, strict=True)))
    scheduler = recipe.build_scheduler(optimizer) if recipe.scheduler else None
    by_name = dict(zip(names, masters, strict=True))
    losses: list[float] = []
    validated: list[float] = []
    for step in range(recipe.max_steps):
        sums: list[torch.Tensor | None] = [None] * len(params)
        for micro in range(recipe.window(step)):
            gradients = []
            for rank in range(world_size):
                batch = recipe.batch(step * recipe.accumulate + micro, rank, world_size)
                loss = model(batch, use_side=step not in recipe.skip_side_at)
                if rank == 0:
                    losses.append(float(loss.detach()))
                (loss / recipe.accumulate * scale).backward()
                gradients.append([None if p.grad is None else p.grad / world_size for p in params])
                model.zero_grad(set_to_none=True)
            of_micro = [_total(parts) for parts in zip(*gradients, strict=True)]
            if accumulate_in == "parameters":
                sums = [_total(parts) for parts in zip(sums, of_micro, strict=True)]
            else:
                _accumulate(masters, of_micro, scale)
        _accumulate(masters, sums, scale)
        if before_update is not None:
            with torch.no_grad():
                before_update(step, by_name)
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(masters, recipe.clip)
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None and (recipe.scheduler == "step" or _ends_epoch(recipe, step)):
            scheduler.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
            if recipe.validate and _ends_epoch(recipe, step):
                means = [float(model(batch)) for batch in recipe.validation_loader()]
                validated.append(sum(means) / len(means))
    return Result(losses, {name: master.detach() for name, master in by_name.items()}, validated)


def _ends_epoch(recipe: Recipe, step: int) -> bool:
    return (step + 1) % recipe.windows_per_epoch == 0


def _total(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def _accumulate(masters: list[nn.Parameter], gradients: list[torch.Tensor | None], scale: float) -> None:
    for master, gradient in zip(masters, gradients, strict=True):
        if gradient is None:
            continue
        unscaled = gradient.float() / scale
        master.grad = unscaled if master.grad is None else master.grad + unscaled
