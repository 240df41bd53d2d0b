"""Small models and one training step of each, with and without offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_smartinfinity import ActivationOffload, TransferConfig
from lightning_smartinfinity.activations import OffloadedActivations
from tests.helpers.native_testing import inject
from tests.helpers.waiting import await_that


class Block(nn.Module):
    """A block of a transformer with one projection for queries, keys and values, whose views share a storage."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projection(self.before(x)).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
        x = x + F.dropout(self.out((scores @ v).transpose(1, 2).flatten(2)), self.dropout)
        return x + self.narrow(F.gelu(self.wide(self.behind(x))))


class Language(nn.Module):
    """Blocks between an embedding and its transpose."""

    def __init__(self, around: Callable[..., torch.Tensor] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.around = around
        self.words = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return F.cross_entropy((x @ self.words.weight.t()).flatten(0, 1), tokens.flatten())


class Pictures(nn.Module):
    """Convolutions, normalizations and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.LazyLinear(5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 12))


def mixed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        return model(batch)


def compiled(backend: str) -> nn.Module:
    return torch.compile(Language(), backend=backend)  # type: ignore[return-value]


Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]

COMPILED = ("aot_eager", "inductor")
"""Models that torch compiles, by the names of its backends."""

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], Run]] = {
    "transformer": (Language, tokens, lambda model, batch: model(batch)),
    "dropout": (lambda: Language(dropout=0.3), tokens, lambda model, batch: model(batch)),
    "reentrant checkpoints": (
        lambda: Language(partial(checkpoint, use_reentrant=True), dropout=0.3),
        tokens,
        lambda model, batch: model(batch),
    ),
    "checkpoints": (
        lambda: Language(partial(checkpoint, use_reentrant=False), dropout=0.3),
        tokens,
        lambda model, batch: model(batch),
    ),
    "autocast": (Language, tokens, mixed),
    **{name: (partial(compiled, name), tokens, lambda model, batch: model(batch)) for name in COMPILED},
    "convolutions": (Pictures, lambda: torch.randn(2, 3, 12, 12), lambda model, batch: model(batch)),
}


# Settings that offload as much as they can.
everything = partial(ActivationOffload, keep=0, min_bytes=1, host_bytes=64 << 20)


@contextmanager
def opened(
    folder: Path | list[Path],
    settings: ActivationOffload | None = None,
    *,
    faults: dict[str, int] | None = None,
    **others: Any,
) -> Iterator[OffloadedActivations]:
    """Yield offloading with injected delays or faults, and close it."""
    activations = OffloadedActivations(
        folder, settings=settings or everything(), transfer=TransferConfig(job="test"), **others
    )
    activations.open()
    inject(activations._store.files.tensors.core, **(faults or {}))
    try:
        yield activations
    finally:
        activations.close()


def finish_writes(activations: OffloadedActivations) -> None:
    """Wait until all that is offloaded is on storage."""
    store = activations._store
    with store.lock:
        # The write of what comes from a device starts behind its copy.
        await_that(lambda: store._reap() or store.traffic().written_bytes >= store.traffic().offloaded_bytes)
        await_that(lambda: store._reap() or not any(store.writes.entries()))


def drop_memory(activations: OffloadedActivations) -> None:
    """Drop all memory of the pool that is on storage, as if others had needed it."""
    finish_writes(activations)
    with activations._store.lock:
        while activations._store.pool.drop():
            pass


def gradients(
    name: str, activations: OffloadedActivations | None = None, *, steps: int = 2
) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of some steps of SGD of a model, by name of the parameter."""
    torch.manual_seed(0)
    build, batches, run = MODELS[name]
    model, batch = build(), batches()
    run(model, batch)  # builds lazy layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if activations is not None:
        activations.module = model
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with nullcontext() if activations is None else activations.forward(batch):
            loss = run(model, batch)
        loss.backward()
        found.append({key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None})
        found[-1] |= {key: value.clone() for key, value in model.named_buffers()}
        optimizer.step()
        batch = batches()
    return found
