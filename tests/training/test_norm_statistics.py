"""Running statistics of norms move, and are saved, as in Lightning's own mixed precision; so is what forward writes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.helpers.trainers import fit

WIDTH = 4
STEPS = 10


class OwnForward(nn.BatchNorm1d):
    """A batch norm that calls torch's function itself, as timm's norms with activations do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.momentum is not None
        mean, var = self.running_mean, self.running_var
        return functional.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum).relu()


class Clamped(nn.BatchNorm1d):
    """A batch norm that clamps its weight within forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        return super().forward(x)


class Frozen(nn.Module):
    """A batch norm of buffers that nothing updates, as in torchvision and transformers."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"weight": 1.5, "bias": 0.5, "running_mean": 20.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((WIDTH,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = self.weight * self.running_var.rsqrt()  # type: ignore[operator, union-attr]
        return x * scale + (self.bias - self.running_mean * scale)  # type: ignore[operator]


class Through(nn.Module):
    """Calls a norm in a way of its own."""

    def __init__(self, norm: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.call = norm, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.norm, x)


def write(norm: Any, _: object) -> None:
    """Write the weights of a norm by ``data``."""
    norm.weight.data[:2] = 0.7
    norm.bias.data = torch.full((WIDTH,), 0.3)


class Norms(pl.LightningModule):
    """Trains a layer after each kind of norm. Means start at 16, and go to 20 in steps too small for bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms: dict[str, nn.Module] = {
            "plain": nn.BatchNorm1d(WIDTH, momentum=0.01),
            "without weights": nn.BatchNorm1d(WIDTH, momentum=0.01, affine=False),
            "cumulative": nn.BatchNorm1d(WIDTH, momentum=None),
            "synchronized": nn.SyncBatchNorm(WIDTH, momentum=0.01).eval(),
            "own forward": OwnForward(WIDTH, momentum=0.01),
            "clamped": Clamped(WIDTH, momentum=0.01),
            "written in a hook": nn.BatchNorm1d(WIDTH, momentum=0.01),
            "frozen": Frozen(),
            # Forward runs again in backward.
            "recomputed": Through(
                nn.BatchNorm1d(WIDTH, momentum=0.01), lambda norm, x: checkpoint(norm, x, use_reentrant=False)
            ),
            # Samples are one long sequence.
            "instance": Through(
                nn.InstanceNorm1d(WIDTH, momentum=0.01, affine=True, track_running_stats=True),
                lambda norm, x: norm(x.t()[None]).squeeze(0).t(),
            ),
        }
        self.norms = nn.ModuleDict(norms)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in norms)
        for name, buffer in self.named_buffers():
            if name.endswith("running_mean"):
                buffer.fill_(16)

    def on_fit_start(self) -> None:
        self.norms["written in a hook"].register_forward_pre_hook(write)

    def on_train_batch_start(self, *_: Any) -> None:
        self.norms["synchronized"].eval()  # torch's needs a GPU to train

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        parts = [layer(norm(batch)) for norm, layer in zip(self.norms.values(), self.layers, strict=True)]
        return torch.stack(parts).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        data = torch.randn(STEPS * 8, WIDTH, generator=torch.Generator().manual_seed(1)) + 20
        return DataLoader(data.bfloat16().float(), batch_size=8)  # type: ignore[arg-type]


def values_of(module: Norms) -> dict[str, torch.Tensor]:
    """Return copies of the module's buffers, and of the weights that forward writes."""
    written = (module.norms[name].named_parameters(prefix=name) for name in ("clamped", "written in a hook"))
    return {name: value.detach().clone() for name, value in (*module.named_buffers(), *chain(*written))}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """Return the values of two fits of one module in Lightning's own bf16-mixed."""
    module, root, found = Norms(), tmp_path_factory.mktemp("plain"), []
    for _ in range(2):
        fit(module, root, "auto", max_steps=STEPS)
        found.append(values_of(module))
    return found


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_statistics_are_those_of_lightning(
    precision: str, expected: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """Their dtype is fp32, and they go where they go in memory, also in a second fit of the module.

    What forward writes to the weights of a norm lasts: norms compute with the parameters themselves.
    """
    module, hooks = Norms(), set()
    for once in expected:
        trainer = fit(module, tmp_path, precision=precision, max_steps=STEPS, use_distributed_sampler=False)
        hooks.add(len(module.norms["plain"]._forward_pre_hooks))
        found = values_of(module)
        assert found.keys() == once.keys()
        for name, buffer in once.items():
            torch.testing.assert_close(found[name], buffer, rtol=2e-3, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")
        trainer.strategy.close()  # type: ignore[attr-defined]
    assert len(hooks) == 1  # the second fit's replace the first one's
