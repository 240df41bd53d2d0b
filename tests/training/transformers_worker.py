"""Builds models of transformers in configure_model, in this process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy
from tests.training.configure_model_worker import Built, fit

VOCAB, LENGTH = 64, 16
# Otherwise ZeRO-3 keeps parameters of fewer than 100,000 elements whole once they were gathered.
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}


def construct(kind: str) -> nn.Module:
    """Construct a model of two small layers without dropout, which initialises its weights once all modules exist."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model: nn.Module
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **drop
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, max_position_embeddings=LENGTH, num_key_value_heads=1, **sizes
        )
        model = transformers.LlamaForCausalLM(config)
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


class Counted(BuiltOnTokens):
    """Loads a model from saved weights, and counts the bytes of tensors on the CPU meanwhile.

    ``most`` is the largest number of bytes at any time, ``kept`` the number at the end. Files that are mapped do not
    count.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda: load(folder))
        self.mapped = {file.stat().st_size for file in folder.glob("*.safetensors")}
        self.most = self.kept = 0

    def configure_model(self) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            super().configure_model()
        assert profiled.profiler is not None
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        # torch reports that it maps a file as an allocation of the file's size.
        held = list(accumulate(nbytes for nbytes in changes if abs(nbytes) not in self.mapped))
        self.most, self.kept = max(held), held[-1]


def tokens() -> torch.Tensor:
    """Return four sequences."""
    return torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def on_each_rank(out: Path) -> dict[str, Any]:
    """Return what a rank sees of a model that is constructed, and of one that is loaded from ``OUT/weights``."""
    loaded, seen = Counted(out / "weights"), {}
    for how, built in {"constructed": BuiltOnTokens(lambda: construct("gpt2")), "loaded": loaded}.items():
        strategy = SmartInfinityStrategy(out / "storage", zero=NOTHING_PERSISTS)
        module = fit(built, out, devices=2, strategy=strategy)
        seen[how] = {"weights": module.weights, "partitioned": module.partitioned}
    return {**seen, "most": loaded.most, "kept": loaded.kept}
