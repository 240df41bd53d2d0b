"""GPT-2 for benchmarks, without dropout and with a tied head: in published sizes, and shallow and wide."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

SIZES = {"tiny": (2, 64, 2), "124m": (12, 768, 12), "355m": (24, 1024, 16), "3.6b": (4, 8192, 64)}
VOCAB, CONTEXT = 50257, 1024


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_proj(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Returns the loss of predicting each token from the tokens before it.

    Args:
        size: One of ``SIZES``.
    """

    def __init__(self, size: str) -> None:
        super().__init__()
        layers, width, heads = SIZES[size]
        vocab = VOCAB if size != "tiny" else 512
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(CONTEXT, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the head turns into logits."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.features(tokens))[:, :-1].float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
