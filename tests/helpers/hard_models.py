"""Modules that are hard for ZeRO-3's hooks, and their training by plain torch.

A case is a LightningModule with a ``loss``; everything in it is plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

WIDTH = 8
DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One training of one hard module.

    Args:
        build: Makes the module; called after ``torch.manual_seed(0)``.
        precision: Lightning's precision.
        steps: Optimizer steps.
        accumulate: Micro-batches per step.
        clip: Gradient norm, or None.
        zero: Settings of ZeRO-3.
        transfer: Settings of the transfer.
        masters: Tolerance of the final masters; the losses' is a quarter of it.
    """

    build: Callable[[], HardModule]
    precision: str = "32-true"
    steps: int = 4
    accumulate: int = 1
    clip: float | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] = field(default_factory=dict)
    masters: float = 2e-5

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return DTYPES[self.precision.split("-")[0]]

    def batch(self, when: int, rank: int = 0) -> torch.Tensor:
        """Return the micro-batch number ``when`` of a rank."""
        generator = torch.Generator().manual_seed(1000 * rank + when)
        return torch.randn(4, WIDTH, generator=generator).to(self.dtype)

    def module(self) -> HardModule:
        """Return a fresh module, whose weights are always the same."""
        torch.manual_seed(0)
        module = self.build()
        module.case = self
        return module


class HardModule(pl.LightningModule):
    """Base of the modules: subclasses define ``loss``, and ``seen`` holds every micro-batch's loss."""

    case: Case

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        """Return the loss of one micro-batch.

        Args:
            x: ``[4, WIDTH]``.
            when: Number of the micro-batch from the start of training.
        """
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Do what the module does by itself after a step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        # The batch is chosen by step, not by the loader: Lightning replays a plain loader after a resume.
        when = self.trainer.global_step * self.case.accumulate + batch_idx % self.case.accumulate
        loss = self.loss(self.case.batch(when, self.global_rank).to(self.device), when)
        self.seen.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.after_step(self.trainer.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.build_optimizer([(n, p) for n, p in self.named_parameters() if p.requires_grad])

    def build_optimizer(self, named: list[tuple[str, Any]]) -> torch.optim.Optimizer:
        """Return an AdamW whose eps is large, so that rounding noise in vanishing gradients stays noise."""
        return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1, eps=1e-4)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        num_batches = self.case.steps * self.case.accumulate * self.trainer.world_size
        return DataLoader(torch.zeros(num_batches, 1), batch_size=1)  # type: ignore[arg-type]


@dataclass
class Trained:
    """Losses of every micro-batch, final masters and number of updates by parameter name."""

    losses: list[float]
    masters: dict[str, torch.Tensor]
    steps: dict[str, int]


def train_plainly(case: Case, *, world_size: int = 1, loss_scale: float = 2.0**10) -> Trained:
    """Train with plain torch: fp32 masters, gradients summed in fp32 and averaged over the ranks."""
    module = case.module().to(case.dtype)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    params = [p for p in module.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = module.build_optimizer(list(zip(names, masters, strict=True)))
    losses: list[float] = []
    # Every rank has buffers of its own.
    buffers = [copy.deepcopy(list(module.buffers())) for _ in range(world_size)]
    for step in range(case.steps):
        for when in range(step * case.accumulate, (step + 1) * case.accumulate):
            for rank in range(world_size):
                _set(list(module.buffers()), buffers[rank])
                loss = _backward(
                    case, module, params, masters, when, rank, world_size=world_size, loss_scale=loss_scale
                )
                _set(buffers[rank], list(module.buffers()))
                losses += [loss] if rank == 0 else []
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_([m for m in masters if m.grad is not None], case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
        module.after_step(step + 1)
    by_name = dict(zip(names, masters, strict=True))
    counts = {name: int(optimizer.state[master].get("step", 0)) for name, master in by_name.items()}
    return Trained(losses, {name: master.detach() for name, master in by_name.items()}, counts)


def _backward(
    case: Case,
    module: HardModule,
    params: list[nn.Parameter],
    masters: list[nn.Parameter],
    when: int,
    rank: int,
    *,
    world_size: int,
    loss_scale: float,
) -> float:
    """Add one rank's gradients of one micro-batch to the masters' and return its loss."""
    scale = loss_scale if case.dtype is torch.float16 else 1.0
    loss = module.loss(case.batch(when, rank), when)
    (loss / case.accumulate * scale).backward()
    for param, master in zip(params, masters, strict=True):
        if param.grad is not None:
            gradient = param.grad.float() / scale / world_size
            master.grad = gradient if master.grad is None else master.grad + gradient
    module.zero_grad(set_to_none=True)
    return float(loss.detach())


def _set(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)
