"""Code that touches parameters and gradients outside of forward: ``python -m tests.training.everyday_code OUT``.

Each function of a table runs in a hook of a small fit, under plain Lightning or under our strategy. As a program it
runs all of them on two processes and saves what each rank saw to ``OUT/<rank>.pt``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.helpers.trainers import quiet_trainer

WIDTH = 8


class Touched(pl.LightningModule):
    """A network with a frozen mean of its own weights, whose hooks run functions of the tables below.

    Attributes:
        seen: What the functions returned, and the losses, as plain numbers.
    """

    def __init__(self, *, builds_late: bool = False, term: str | None = None) -> None:
        super().__init__()
        self.builds_late, self.term = builds_late, term
        self.seen: list[Any] = []
        self.kept: dict[str, Any] = {}
        if not builds_late:
            self.build()

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 1)
        )
        self.mean = copy.deepcopy(self.net).requires_grad_(False)

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.build()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [param for param in self.net.parameters() if param.ndim >= 2]
        others = [param for param in self.net.parameters() if param.ndim < 2]
        self.seen.append((len(matrices), len(others), sum(param.numel() for param in self.parameters())))
        groups = [{"params": matrices, "weight_decay": 0.3, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        before = TERMS[self.term](self) if self.term is not None and self.term.startswith("before") else 0
        weight = self.net[3].weight  # looked up before the forward that releases it
        loss = ((self.net(batch) - 1) ** 2).mean() + before
        if self.term is not None and not self.term.startswith("before"):
            loss = loss + TERMS[self.term](self)
        if self.term == "before":
            loss = loss + (weight @ weight.T).square().sum() * 0.01
        self.seen.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.term is None:
            name = list(GRADIENTS)[self.global_step % len(GRADIENTS)]
            self.seen.append((name, GRADIENTS[name](self)))

    @torch.no_grad()
    def on_train_batch_end(self, outputs: object, batch: torch.Tensor, index: int) -> None:
        if self.term is not None:
            return
        names = list(WRITES)
        if index < len(names):
            WRITES[names[index]](self)
            self.seen.append((names[index], self.sums()))
        elif index == len(names):
            self.seen.extend((name, read(self)) for name, read in READS.items())

    def sums(self) -> list[float]:
        """Return the sum of the squares of each parameter."""
        return [float(param.square().sum()) for param in self.parameters()]

    def train_dataloader(self) -> Any:
        batches = len(WRITES) + 2 if self.term is None else 4
        data = torch.randn(2 * batches, WIDTH, generator=torch.Generator().manual_seed(1))
        return DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def _keep(module: Touched) -> None:
    module.kept["state"] = {name: value.clone() for name, value in module.net.state_dict().items()}
    module.kept["alias"] = module.net[0].weight.data


def _restore(module: Touched) -> None:
    module.net.load_state_dict(module.kept["state"])


def _average(module: Touched) -> None:
    average = AveragedModel(module.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    average.update_parameters(module.net)
    module.net[0].weight.mul_(1.5)
    average.update_parameters(module.net)
    module.mean.load_state_dict(average.module.state_dict())


def _copy_whole(module: Touched) -> None:
    copied = copy.deepcopy(module.net)
    copied[0].weight.fill_(0.25)
    module.mean[0].weight.copy_(copied[0].weight)
    module.kept["forward"] = float(copied(torch.ones(3, WIDTH)).sum())


def _swap(module: Touched) -> None:
    for mean, own in _pairs(module):
        mean.data, own.data = own.data, mean.data


def _pairs(module: Touched) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(module.mean.parameters(), module.net.parameters(), strict=True))


WRITES: dict[str, Callable[[Touched], object]] = {
    "lerp_": lambda m: [mean.lerp_(own, 0.5) for mean, own in _pairs(m)],
    "mul_ and add_ of data": lambda m: [mean.data.mul_(0.5).add_(own.data, alpha=0.5) for mean, own in _pairs(m)],
    "foreach": lambda m: torch._foreach_lerp_(list(m.mean.parameters()), list(m.net.parameters()), 0.5),  # type: ignore[attr-defined]
    "clamp_": lambda m: [param.clamp_(-0.3, 0.3) for param in m.net.parameters()],
    "one row": lambda m: m.net[0].weight.__setitem__(slice(2, 4), 0.5),
    "a mask": lambda m: m.net[3].weight.__setitem__(m.net[3].weight > 0.1, 0.1),
    "a column of data": lambda m: m.net[0].weight.data[:, 1].zero_(),
    "nn.init": lambda m: nn.init.constant_(m.net[3].bias, 0.1),
    "data assigned": lambda m: setattr(m.net[5].weight, "data", m.net[5].weight.data * 0.5),
    "data swapped": _swap,
    "set_": lambda m: m.net[3].bias.set_(torch.full((6,), 0.3)),
    "index_fill_": lambda m: m.net[0].weight.index_fill_(0, torch.tensor([5]), 0.2),
    "out=": lambda m: torch.mul(m.net[3].weight.data, 0.9, out=m.net[3].weight.data),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.net.parameters()) * 0.9, m.net.parameters()
    ),
    "a norm": lambda m: m.net[0].weight.div_(m.net[0].weight.norm(dim=1, keepdim=True).clamp_(min=1.0)),
    "keep": _keep,
    "a kept alias": lambda m: m.kept["alias"].mul_(0.5),
    "restore": _restore,
    "AveragedModel": _average,
    "deepcopy of a module": _copy_whole,
    "reset_parameters": lambda m: (torch.manual_seed(3), m.net[3].reset_parameters()),
}

READS: dict[str, Callable[[Touched], object]] = {
    "shapes": lambda m: [
        (tuple(p.shape), p.ndim, p.numel(), p.size(0), len(p), p.stride()) for p in m.net.parameters()
    ],
    "norm": lambda m: float(m.net[0].weight.norm()),
    "total norm": lambda m: float(nn.utils.get_total_norm(list(m.net.parameters()))),
    "item": lambda m: m.net[0].weight[1, 2].item(),
    "comparison": lambda m: bool((m.net[0].weight == m.net[0].weight.clone()).all()),
    "numpy": lambda m: float(np.asarray(m.net[0].weight.detach()).sum()),
    "tolist": lambda m: m.net[5].bias.tolist(),
    "histogram": lambda m: torch.histc(m.net[0].weight, 4).tolist(),
    "cat": lambda m: float(torch.cat([p.flatten() for p in m.parameters()]).sum()),
    "views": lambda m: float(m.net[0].weight.T[1:3].reshape(-1)[::2].sum()),
    "unbind": lambda m: [float(row.sum()) for row in m.net[3].weight],
    "split": lambda m: [tuple(part.shape) for part in m.net[0].weight.split(5)],
    "matmul": lambda m: float((m.net[3].weight @ m.net[3].weight.T).trace()),
    "svd": lambda m: torch.linalg.svdvals(m.net[3].weight).tolist(),
    "state dict": lambda m: {name: float(value.sum()) for name, value in m.net.state_dict().items()},
    "functional": lambda m: float(nn.functional.linear(torch.ones(1, WIDTH), m.net[0].weight, m.net[0].bias).sum()),
    "zeros_like": lambda m: tuple(torch.zeros_like(m.net[0].weight).shape),
    "dtype and device": lambda m: (str(m.net[0].weight.dtype), str(m.net[0].weight.device), m.net[0].weight.is_leaf),
    "any nan": lambda m: any(bool(torch.isnan(p).any()) for p in m.parameters()),
    "the copied module": lambda m: m.kept["forward"],
}

GRADIENTS: dict[str, Callable[[Touched], object]] = {
    "grad_norm": lambda m: grad_norm(m.net, norm_type=2),
    "clip_grad_norm_": lambda m: float(nn.utils.clip_grad_norm_(m.net.parameters(), 0.05)),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.net.parameters(), 1e-3),
    "mul_": lambda m: [p.grad.mul_(0.5) for p in m.net.parameters() if p.grad is not None] and None,
    "shape": lambda m: [tuple(p.grad.shape) for p in m.net.parameters() if p.grad is not None],
    "none": lambda m: setattr(m.net[0].weight, "grad", None),
    "assigned": lambda m: [setattr(p, "grad", torch.ones_like(p) * 1e-3) for p in m.net.parameters()] and None,
    "one element": lambda m: m.net[0].weight.grad[0].zero_() is None,  # type: ignore[index]
    "nan check": lambda m: any(bool(torch.isnan(p.grad).any()) for p in m.net.parameters() if p.grad is not None),
    "sum": lambda m: sum(float(p.grad.abs().sum()) for p in m.net.parameters() if p.grad is not None),
}

TERMS: dict[str, Callable[[Touched], torch.Tensor]] = {
    "L2": lambda m: 0.01 * sum(p.pow(2).sum() for p in m.net.parameters()),
    "before, L2": lambda m: 0.01 * sum(p.pow(2).sum() for p in m.net.parameters()),
    "L1 of a vector": lambda m: 0.01 * nn.utils.parameters_to_vector(m.net.parameters()).abs().sum(),
    "distance": lambda m: 0.1 * sum(((p - mean) ** 2).sum() for mean, p in _pairs(m)),
    "zero": lambda m: 0.0 * sum(p.sum() for p in m.net.parameters()),
    "orthogonality": lambda m: 0.1 * ((m.net[3].weight @ m.net[3].weight.T - torch.eye(6)) ** 2).sum(),
    "views": lambda m: m.net[0].weight[2:5].T.exp().mean() + m.net[3].weight.view(-1)[::2].norm(),
    "a constant": lambda m: (m.net[3].weight * m.net[3].weight.detach()).sum() * 0.1,
    "a kept one": lambda m: (lambda p: p.square().sum() * p.norm() * 0.01)(next(iter(m.net.parameters()))),
    "before": lambda m: torch.zeros(()),
    "autograd.grad of all": lambda m: (
        0.01
        * sum(
            each.square().sum()
            for each in torch.autograd.grad(
                m.net(torch.ones(2, WIDTH)).square().mean(), list(m.net.parameters()), create_graph=True
            )
        )
    ),
    "autograd.grad": lambda m: (
        torch.autograd.grad(m.net[3].weight.square().sum(), m.net[3].weight, create_graph=True)[0].square().sum() * 0.01
    ),
}


def run(root: Path, strategy: Any = "auto", *, devices: int = 1, **module: Any) -> list[Any]:
    """Fit for one epoch and return what the module saw."""
    touched = Touched(**module)
    trainer = quiet_trainer(
        root, strategy, precision="32-true", max_epochs=1, devices=devices, use_distributed_sampler=False
    )
    trainer.fit(touched)
    touched.seen.append(touched.sums())
    return touched.seen


def main() -> None:
    from lightning_smartinfinity import SmartInfinityStrategy

    out, seen = Path(sys.argv[1]), {}
    for name in (None, *TERMS):
        strategy = SmartInfinityStrategy(out / "storage")
        seen[name] = run(out, strategy, devices=2, builds_late=name is None, term=name)
        strategy.close()
    torch.save(seen, out / f"{strategy.global_rank}.pt")


if __name__ == "__main__":
    main()
