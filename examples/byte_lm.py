"""A GPT-2-style decoder over bytes, in plain torch, as a LightningModule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# name -> layers, width, heads. The larger ones are as deep and wide as it takes to reach GPT-2's parameter counts
# with 256 bytes for a vocabulary instead of 50257 tokens.
SIZES = {
    "nano": (2, 64, 2),
    "tiny": (4, 256, 4),
    "small": (8, 512, 8),
    "124m": (15, 832, 13),
    "355m": (28, 1024, 16),
    "774m": (39, 1280, 20),
    "1.5b": (50, 1600, 25),
}
NUM_BYTES = 256


class ByteLM(L.LightningModule):
    """Predicts the next byte; trained with AdamW, weight decay on matrices only, warm-up and cosine decay.

    Args:
        model_size: One of ``SIZES``.
        block_size: The most bytes the model sees at once.
        lr: Peak learning rate.
        weight_decay: Weight decay of matrices; vectors (biases, norms) and embeddings have none.
        warmup_share: Share of the steps that the learning rate rises for.
        init_from: Checkpoint to take weights from: a file, or a ZeRO-3 checkpoint folder.
    """

    def __init__(
        self,
        model_size: str = "tiny",
        block_size: int = 128,
        lr: float = 2e-3,
        weight_decay: float = 0.1,
        warmup_share: float = 0.1,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        if model_size not in SIZES:
            raise ValueError(f"model_size={model_size!r} is unknown. Choose one of: {', '.join(SIZES)}.")
        self.save_hyperparameters(ignore="init_from")
        self.block_size = block_size
        self.model: Decoder | None = None
        if init_from is not None:
            self.configure_model()
            self.load_state_dict(load_weights(init_from))

    def configure_model(self) -> None:
        # The model is made here and not in __init__, so that ZeRO-3 divides each layer as soon as it is made.
        if self.model is None:
            self.model = Decoder(*SIZES[self.hparams["model_size"]], block_size=self.block_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, time, 256]`` for int64 tokens ``[batch, time]``."""
        assert self.model is not None
        return self.model(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per byte of uint8 ``[batch, time + 1]``."""
        tokens = windows.long()
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> dict[str, Any]:
        parameters = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        decayed = [parameter for name, parameter in parameters if is_matrix(name)]
        others = [parameter for name, parameter in parameters if not is_matrix(name)]
        groups = [
            {"params": decayed, "weight_decay": self.hparams["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=(0.9, 0.95))
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup = max(1, round(self.hparams["warmup_share"] * num_steps))
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, num_warmup=num_warmup, num_steps=num_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Continues a prompt; with ZeRO-3 every rank must call this, since every forward gathers parameters.

        Args:
            prompt: At least one byte.
            num_bytes: Number of bytes to add.
            temperature: 0 takes the likeliest byte each time.
            seed: Seed of the sampling; the same on every rank.
        """
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor(list(prompt), dtype=torch.long)
        for _ in range(num_bytes):
            window = tokens[-self.block_size :].unsqueeze(0).to(self.device)
            with self.trainer.precision_plugin.forward_context():
                logits = self(window)[0, -1].float().cpu()
            tokens = torch.cat([tokens, choose(logits, temperature, generator)])
        self.train(was_training)
        return bytes(tokens.tolist())


class Decoder(nn.Module):
    """Pre-norm transformer decoder with learned positions."""

    def __init__(self, num_layers: int, width: int, num_heads: int, *, block_size: int) -> None:
        super().__init__()
        self.bytes = Embedding(NUM_BYTES, width)
        self.positions = Embedding(block_size, width)
        self.blocks = nn.ModuleList([Block(width, num_heads, num_layers) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, NUM_BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention and a feed-forward net, each added to its input."""

    def __init__(self, width: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        residual_std = 0.02 / math.sqrt(2 * num_layers)
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width, std=residual_std)
        self.norm2 = nn.LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, time, width))


class Linear(nn.Linear):
    """A layer with GPT-2's initialisation, drawn in the constructor: afterwards ZeRO-3 has taken the weight away."""

    def __init__(self, in_features: int, out_features: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with GPT-2's initialisation, drawn as in :class:`Linear`."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def is_matrix(name: str) -> bool:
    """Return whether a parameter is a matrix, by its name, since ZeRO-3 leaves no shape to go by."""
    return name.endswith(".weight") and not any(part in name for part in ("norm", "bytes", "positions"))


def load_weights(path: str) -> dict[str, Tensor]:
    """Return weights by name from a Lightning checkpoint file or a ZeRO-3 checkpoint folder."""
    if Path(path).is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return dict(get_fp32_state_dict_from_zero_checkpoint(path, tag="checkpoint"))
    return dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])


def warmup_cosine(step: int, *, num_warmup: int, num_steps: int) -> float:
    """Return the factor of the peak learning rate, which rises to 1, then falls to 0.1 along a cosine."""
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return the next byte, int64 ``[1]``, for float32 logits ``[256]``."""
    if temperature == 0:
        return logits.argmax().reshape(1)
    return torch.multinomial(F.softmax(logits / temperature, dim=0), 1, generator=generator)
