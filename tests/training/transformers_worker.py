"""Builds models of transformers in configure_model: ``python -m tests.training.transformers_worker OUT``.

As a program it builds one from a configuration and one from saved weights on two processes, and saves what each rank
saw to ``OUT/<how>-<rank>.pt``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.training.configure_model_worker import Built, fit

VOCAB, LENGTH = 64, 16


def config_of(kind: str) -> Any:
    """Return a configuration of two small layers without dropout."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    if kind == "gpt2":
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **drop)
    return transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, num_key_value_heads=1, **sizes)


def construct(kind: str) -> nn.Module:
    """Construct the model, which initialises its weights once all modules exist."""
    import transformers

    classes = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
    model: nn.Module = getattr(transformers, classes[kind])(config_of(kind))
    return model


def load(folder: Path) -> nn.Module:
    """Load the model from saved weights."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model


class BuiltOnTokens(Built):
    """A module that trains on random tokens."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__(build, language_loss)

    def train_dataloader(self) -> Any:
        return DataLoader(tokens(), batch_size=2)  # type: ignore[arg-type]


def tokens() -> torch.Tensor:
    """Return four sequences."""
    return torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def main() -> None:
    out = Path(sys.argv[1])
    for how, build in {"constructed": lambda: construct("gpt2"), "loaded": lambda: load(out / "weights")}.items():
        module = fit(BuiltOnTokens(build), out, devices=2)
        seen = {"weights": module.weights, "partitioned": module.partitioned}
        torch.save(seen, out / f"{how}-{module.global_rank}.pt")


if __name__ == "__main__":
    main()
