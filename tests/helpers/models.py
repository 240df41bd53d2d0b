"""Small real models, deterministic data and a LightningModule that records what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

VOCAB = 64
CONTEXT = 16


class Block(nn.Module):
    """Pre-norm transformer block; attention and MLP biases give parameters of many sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: a key's bias has no gradient in theory; Adam turns the rounding noise in its place into full steps.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.out(scores.masked_fill(mask, -1e4).softmax(-1) @ v)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Odd(nn.Module):
    """Scales by one element, once of shape ``[]``, and shifts three: ranks cannot divide these evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(3))
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.scale + functional.pad(self.shift, (0, x.shape[-1] - 3))


class TinyGPT(nn.Module):
    """A GPT of two blocks; ``side`` is a parameter that only some steps use, ``frozen`` is never trained."""

    def __init__(
        self, *, width: int = 32, depth: int = 2, tied: bool = True, frozen: bool = False, odd: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.norm = nn.LayerNorm(width)
        self.side = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.odd = Odd() if odd else nn.Identity()
        if tied:
            self.head.weight = self.tokens.weight
        if frozen:
            self.positions.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, *, use_side: bool = True) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.odd(self.norm(x))
        if use_side:
            x = x + self.side(x)
        logits = self.head(x[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Tokens(Dataset[torch.Tensor]):
    """Learnable sequences: an affine walk over the vocabulary with random starts."""

    def __init__(self, num_samples: int = 64) -> None:
        start = torch.randint(0, VOCAB, (num_samples, 1), generator=torch.Generator().manual_seed(7))
        self.data = (start + 5 * torch.arange(CONTEXT)) % VOCAB

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


@dataclass(frozen=True)
class Recipe:
    """The model and the settings of a training, in plain values that can cross process boundaries."""

    precision: str = "32-true"
    optimizer: str = "AdamW"
    lr: float = 1e-2
    weight_decay: float = 0.1
    # Large, so that Adam does not turn rounding noise in vanishing gradients into full steps.
    eps: float | None = 1e-4
    groups: bool = False
    scheduler: str | None = None
    accumulate: int = 1
    clip: float | None = None
    tied: bool = True
    frozen: bool = False
    skip_side_at: tuple[int, ...] = ()
    batch_size: int = 2
    max_steps: int = 6
    width: int = 32
    depth: int = 2
    epoch_batches: int = 32
    odd: bool = False
    # The loss of these steps is NaN on this rank alone, or on all if it is None.
    nan_at: tuple[int, ...] = ()
    nan_rank: int | None = None
    # Validate after every epoch.
    validate: bool = False
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)

    def build_model(self) -> TinyGPT:
        return TinyGPT(width=self.width, depth=self.depth, tied=self.tied, frozen=self.frozen, odd=self.odd)

    def set_up(self, fabric: Fabric) -> tuple[TinyGPT, Any, Any]:
        """Return a module, and what Fabric makes of it and of its optimizer."""
        module = self.build_model()
        return module, *fabric.setup(module, self.build_optimizer(list(module.named_parameters())))

    def build_optimizer(self, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
        kwargs = {"lr": self.lr, "weight_decay": self.weight_decay, **self.optimizer_kwargs}
        if self.eps is not None:
            kwargs.setdefault("eps", self.eps)
        factory: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, self.optimizer)
        if not self.groups:
            return factory([p for _, p in trainable], **kwargs)
        decayed = [p for name, p in trainable if "norm" not in name and not name.endswith("bias")]
        others = [p for name, p in trainable if "norm" in name or name.endswith("bias")]
        return factory([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": self.lr / 2}], **kwargs)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.scheduler == "step":
            return torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=4)
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def batch(self, index: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
        """Return a rank's micro-batch number ``index``, as DistributedSampler would choose it without shuffling."""
        data = Tokens().data
        first = index * self.batch_size
        return torch.stack([data[((first + i) * world_size + rank) % len(data)] for i in range(self.batch_size)])

    def window(self, step: int) -> int:
        """Return the number of a step's micro-batches; the last step of an epoch may have fewer than ``accumulate``."""
        first = step % self.windows_per_epoch * self.accumulate
        return min(self.accumulate, self.epoch_batches - first)

    @property
    def windows_per_epoch(self) -> int:
        """Steps per epoch."""
        return -(-self.epoch_batches // self.accumulate)

    def loader(self, world_size: int = 1) -> DataLoader[torch.Tensor]:
        """Return ``epoch_batches`` micro-batches for every rank; Lightning distributes the samples."""
        num_samples = self.batch_size * self.epoch_batches * world_size
        return DataLoader(Tokens(num_samples), batch_size=self.batch_size, shuffle=False)

    def validation_loader(self) -> DataLoader[torch.Tensor]:
        """Return eight batches of four, which Lightning distributes like those of training."""
        return DataLoader(Tokens().data[:32], batch_size=4, shuffle=False)  # type: ignore[arg-type]


class LitTiny(pl.LightningModule):
    """Trains a recipe's model; ``losses`` holds every micro-batch's loss, ``validated`` every validation's mean."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = recipe.build_model()
        self.losses: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        # The batch is chosen by step, not by the loader: Lightning replays a plain loader after a resume.
        step, micro = self.trainer.global_step, batch_idx % self.recipe.accumulate
        tokens = self.recipe.batch(step * self.recipe.accumulate + micro, self.global_rank, self.trainer.world_size)
        loss: torch.Tensor = self.model(tokens.to(self.device), use_side=step not in self.recipe.skip_side_at)
        self.losses.append(float(loss.detach()))
        if step in self.recipe.nan_at and self.recipe.nan_rank in (None, self.global_rank):
            loss = loss * float("nan")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(batch), sync_dist=True)

    def on_validation_end(self) -> None:
        if self.recipe.validate and not self.trainer.sanity_checking:
            self.validated.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.build_optimizer(list(self.model.named_parameters()))
        if self.recipe.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.recipe.build_scheduler(optimizer), "interval": self.recipe.scheduler}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return self.recipe.loader(self.trainer.world_size)

    def val_dataloader(self) -> Any:
        return self.recipe.validation_loader() if self.recipe.validate else []
