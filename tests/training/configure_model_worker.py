"""Builds models in configure_model, of transformers, too, in this process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.zero3.parameters import gather_on_use
from tests.helpers.initialised import WIDTH, Initialised
from tests.helpers.trainers import quiet_trainer


class Built(pl.LightningModule):
    """A module that builds its model in configure_model.

    ``weights`` holds the values before the first step, ``losses`` one loss per step.
    """

    def __init__(self, build: Callable[[], nn.Module], loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.build, self.loss = build, loss
        self.weights: dict[str, torch.Tensor] = {}
        self.first_buffers: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []
        # Whether ZeRO-3 had partitioned each parameter when configure_model ended.
        self.partitioned: list[bool] = []

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)  # only the values of rank 0 count
        self.model = self.build()
        self.partitioned = [hasattr(param, "ds_id") for param in self.model.parameters()]

    def on_train_start(self) -> None:
        for name, param in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters(param):
                self.weights[name] = param.detach().clone()
        self.first_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(inputs(), batch_size=2)  # type: ignore[arg-type]


def inputs() -> torch.Tensor:
    """Return four samples."""
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss for :class:`Initialised`."""
    return model(batch.to(next(model.parameters()).dtype)).float().square().mean()


def fit(module: Built, root: Path, **settings: Any) -> Built:
    """Fit for one step."""
    trainer = quiet_trainer(root, **{"precision": "32-true", "max_steps": 1, **settings})
    trainer.fit(module)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return module


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
    """Return what a rank sees of models that are constructed, and of one that is loaded from ``OUT/weights``.

    ZeRO-3 partitions parameters again as soon as others are used.
    """
    gather_on_use._GATHERED_BYTES = 0
    builds: dict[str, tuple[Built, str]] = {
        "initialised": (Built(Initialised, squares), "32-true"),
        "in bf16": (Built(Initialised, squares), "bf16-mixed"),
        "constructed": (BuiltOnTokens(lambda: construct("gpt2")), "32-true"),
        "loaded": (Counted(out / "weights"), "32-true"),
    }
    for module, precision in builds.values():
        strategy = SmartInfinityStrategy(out / "storage", zero=NOTHING_PERSISTS)
        fit(module, out, devices=2, precision=precision, strategy=strategy)
    names = ("weights", "first_buffers", "partitioned", "most", "kept")
    return {how: {name: getattr(module, name, None) for name in names} for how, (module, _) in builds.items()}
