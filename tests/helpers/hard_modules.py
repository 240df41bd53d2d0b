"""Modules that are hard for ZeRO-3's hooks, and their training by plain torch.

A case is a LightningModule with a ``loss``; everything in it is plain torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
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


def train_plainly(case: Case, *, world_size: int = 1) -> Trained:
    """Train with plain torch: fp32 masters, gradients summed in fp32 and averaged over the ranks."""
    module = case.module().to(case.dtype)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    params = [p for p in module.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = module.build_optimizer(list(zip(names, masters, strict=True)))
    losses: list[float] = []
    # Every rank has buffers of its own.
    buffers = [copy.deepcopy(list(module.buffers())) for _ in range(world_size)]
    scale = 2.0**10 if case.dtype is torch.float16 else 1.0
    for step in range(case.steps):
        for when in range(step * case.accumulate, (step + 1) * case.accumulate):
            for rank in range(world_size):
                _set(list(module.buffers()), buffers[rank])
                loss = module.loss(case.batch(when, rank), when)
                (loss / case.accumulate * scale).backward()
                for param, master in zip(params, masters, strict=True):
                    if param.grad is not None:
                        gradient = param.grad.float() / scale / world_size
                        master.grad = gradient if master.grad is None else master.grad + gradient
                module.zero_grad(set_to_none=True)
                _set(buffers[rank], list(module.buffers()))
                losses += [float(loss.detach())] if rank == 0 else []
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


def _set(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def mean_square(*outputs: torch.Tensor) -> torch.Tensor:
    """Return a loss in fp32, whatever the outputs' types."""
    return sum(((output.float() - 0.5) ** 2).mean() for output in outputs)  # type: ignore[return-value]


class Stack(HardModule):
    """Two linear layers. Subclasses run their unusual structure between them, with a third layer or without."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer: Any = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        return mean_square(self.back(self.middle(self.front(x), when)))


# ---- modules used several times


class Reused(Stack):
    """One layer that a forward uses several times."""

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))  # type: ignore[no-any-return]


class Nested(Stack):
    """One layer inside two parents and by itself, whose weight a function uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Sequential(self.layer, nn.Tanh()), nn.Linear(WIDTH, WIDTH))
        self.second = nn.ModuleDict({"deep": nn.Sequential(nn.Tanh(), self.layer)})

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        x = self.second["deep"](self.first(x))
        return torch.tanh(functional.linear(self.layer(x), self.layer.weight))


class TiedThrice(HardModule):
    """One weight as embedding, as head and as a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WIDTH, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix.weight = self.head.weight = self.tokens.weight

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        hidden = torch.tanh(self.mix(self.tokens(x.argmax(-1))))
        return functional.cross_entropy(self.head(hidden).float(), x.argmin(-1))


# ---- checkpoints


class Checkpointed(Stack):
    """Segments under activation checkpointing that share the layer, which may be used outside of them, too.

    Args:
        use_reentrant: Which of torch's two implementations to use.
        context_fn: Context of selective checkpointing, or None.
        outside: Whether the shared layer is used without a checkpoint as well.
    """

    def __init__(
        self, *, use_reentrant: bool, context_fn: Callable[[], Any] | None = None, outside: bool = True
    ) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.outside = outside
        self.options: dict[str, Any] = {"use_reentrant": use_reentrant}
        if context_fn is not None:
            self.options["context_fn"] = context_fn

    def segment(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.own[index](torch.tanh(self.layer(x)))))

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        for index in range(len(self.own)):
            x = checkpoint(self.segment, index, x, **self.options)
        return self.layer(x) if self.outside else x


# ---- parameters that not every step uses


class SometimesUsed(HardModule):
    """``even`` and ``odd`` take turns, ``late`` starts late, ``never`` is never used, ``once`` by one micro-batch."""

    def __init__(self, *, micro_batches: int = 1) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        for name in ("front", "even", "odd", "late", "never", "once", "back"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        step, micro = divmod(when, self.micro_batches)
        x = self.front(x)
        x = x + (self.odd if step % 2 else self.even)(x)
        if step >= 2:
            x = x + self.late(x)
        if micro == self.micro_batches - 1 and step == 1:
            x = x + self.once(x)
        return mean_square(self.back(x))


class UsedLate(Stack):
    """Reads a child's parameter itself from the third step on, beside a batch norm with its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.front.register_parameter("bias", None)  # before a norm its gradient would be rounding noise
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), Bias()

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        x = self.norm(x)
        return x + self.layer.bias if when >= 2 else x


class Thawing(Stack):
    """A layer that is frozen in every other step, by ``requires_grad_`` in the step itself."""

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        self.layer.requires_grad_(when % 2 == 0)
        return super().middle(x, when)

    def after_step(self, step: int) -> None:
        self.layer.requires_grad_(True)


# ---- shapes and kinds of tensors


class Shapes(HardModule):
    """Tensors of odd sizes, and others that were views or not contiguous when they were registered.

    Args:
        empty: Whether there are tensors without elements, too.
        scalars: Whether there are tensors without a dimension, too: one that is trained, and a frozen one.
    """

    def __init__(self, *, empty: bool = False, scalars: bool = False) -> None:
        super().__init__()
        self.one, self.three, self.prime = (nn.Parameter(torch.randn(n)) for n in (1, 3, 131))
        self.scalars = nn.ParameterList([torch.tensor(0.7), torch.tensor(1.3)] if scalars else [])
        if scalars:
            self.scalars[1].requires_grad_(False)
        self.empties = nn.ParameterList([torch.zeros(0), torch.zeros(0, 5)] if empty else [])
        self.transposed = nn.Parameter(torch.randn(WIDTH, 5).t())
        self.strided = nn.Parameter(torch.randn(WIDTH, 10)[:, ::2])
        self.channels_last = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.view = nn.Parameter(torch.randn(100)[50:58])

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        x = (x * self.view) @ self.transposed.t() + x @ self.strided
        x = x * self.one + functional.pad(self.three, (0, 2)) + self.prime.view(1, -1)[:, :5] * self.prime.mean()
        x = x * math.prod(self.scalars)
        empty = x.new_zeros(1) + sum(parameter.sum() for parameter in self.empties)
        return mean_square(torch.tanh(x), x.mean() * self.channels_last, empty)


class Layers(HardModule):
    """Layers of torch's own that are awkward for ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WIDTH, WIDTH, padding_idx=2)
        # Layers before a norm have no bias, nor do keys: its gradient would be nothing but rounding noise.
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(2 * WIDTH, WIDTH))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.conv, self.batch_norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm1d(WIDTH)

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        # Every sample is an order of the eight tokens, one of which is the padding.
        tokens = x.argsort(-1)
        hidden = self.tokens(tokens)
        hidden = hidden + self.attention(hidden, hidden, hidden)[0]
        hidden = self.spectral(self.weight_norm(self.lstm(hidden)[0]))
        hidden = self.batch_norm(self.conv(hidden.transpose(1, 2)))
        return mean_square(hidden)


class Bias(nn.Module):
    """A module whose forward takes no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> torch.Tensor:
        return self.bias


class Factors(nn.Module):
    """A module whose forward takes only a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.randn(WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": torch.randn(WIDTH)})

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            x = x * factor
        return x + self.named["shift"]


class Containers(HardModule):
    """Parameters in containers, in modules without arguments, and on the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias, self.factors = Bias(), Factors()
        self.layers = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.offsets = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(3)])
        self.register_buffer("mean", torch.zeros(WIDTH))

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        x = (x - self.mean) @ self.scale + self.bias()
        x = self.factors(x=torch.tanh(x))
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return mean_square(x + sum(self.offsets))


@dataclass
class Output:
    """An output like that of a Hugging Face model."""

    hidden: torch.Tensor
    extra: dict[str, Any]


# Makes a nested structure of two tensors, and takes them out again.
NESTS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "dict": (lambda a, b: {"a": a, "b": {"c": [b, None, 3]}}, lambda nest: (nest["a"], nest["b"]["c"][0])),
    "tuple": (lambda a, b: (a, (b, [None, "text"])), lambda nest: (nest[0], nest[1][0])),
    "dataclass": (lambda a, b: Output(a, {"second": b}), lambda nest: (nest.hidden, nest.extra["second"])),
    "list": (lambda a, b: [a, b], lambda nest: (nest[0], nest[1])),
}


class Returns(nn.Module):
    """Two layers whose outputs are returned in a nested structure.

    Args:
        kind: Kind of the structure.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return NESTS[self.kind][0](self.first(x), torch.tanh(self.second(x)))


class Outputs(Stack):
    """Modules that return nested outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.nests = nn.ModuleDict({kind: Returns(kind) for kind in NESTS})

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        x = super().middle(x, when)
        for kind, nest in self.nests.items():
            x = math.prod(NESTS[kind][1](nest(x)))  # type: ignore[assignment, arg-type]
        return x


# ---- frozen parts


def grouped(named: list[tuple[str, Any]], order: str) -> list[dict[str, Any]]:
    """Return the groups of weights (w), biases (b) and nothing (0), in the order of a word of these letters."""
    weights = [param for name, param in named if not name.endswith("bias")]
    biases = [param for name, param in named if name.endswith("bias")]
    kinds: dict[str, dict[str, Any]] = {
        "w": {"params": weights, "weight_decay": 0.1, "lr": 1e-2},
        "b": {"params": biases, "weight_decay": 0.0, "lr": 5e-3},
        "0": {"params": [], "weight_decay": 0.5, "lr": 1.0},
    }
    return [dict(kinds[letter]) for letter in order]


class Adapted(Stack):
    """A frozen base with small trainable factors beside it, as in LoRA; most of its parameter groups are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        return super().middle(x, when) + self.up(self.down(x))

    def build_optimizer(self, named: list[tuple[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(grouped(named, "0w0b"), eps=1e-4)


class Teacher(Stack):
    """A frozen layer, used without gradient in every step, as another one is that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        with torch.no_grad():
            target = torch.tanh(self.teacher(x)) + self.layer(x)
        return self.layer(x) - target  # type: ignore[no-any-return]


# ---- unusual backward passes


class Penalty(Stack):
    """The gradient's norm with respect to the input is part of the loss."""

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        x = x.clone().requires_grad_()
        loss = super().loss(x, when)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.float().pow(2).sum()


class Balanced(Stack):
    """Two losses, weighed by the slopes that they give the last layer, as in VQGAN: the graph is used three times."""

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        output = self.back(self.middle(self.front(x), when))
        losses = mean_square(output), output.float().abs().mean()
        slopes = [torch.autograd.grad(loss, self.back.weight, retain_graph=True)[0].float().norm() for loss in losses]
        return losses[0] + (slopes[0] / (slopes[1] + 1e-3)).detach() * losses[1]


class Meta(Stack):
    """The loss after one step of gradient descent on the middle layer, differentiated through that step."""

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        inner = super().loss(x, when)
        slopes = torch.autograd.grad(inner, (self.layer.weight, self.layer.bias), create_graph=True)
        hidden = self.front(x * 0.5)
        hidden = torch.tanh(self.layer(hidden) - 0.1 * functional.linear(hidden, *slopes))
        return inner + mean_square(self.back(hidden))


class TwoBackwards(Stack):
    """One forward, two backwards by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def losses(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two losses of one graph."""
        output = self.back(self.middle(self.front(x), 0))
        return mean_square(output), output.float().abs().mean()

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        return sum(self.losses(x))  # type: ignore[return-value]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        first, second = self.losses(self.case.batch(self.trainer.global_step, self.global_rank).to(self.device))
        self.seen.append(float((first + second).detach()))
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        optimizer.step()
        optimizer.zero_grad()


class Large(HardModule):
    """One tensor of many tasklets behind a few small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(7_001, WIDTH))

    def loss(self, x: torch.Tensor, when: int) -> torch.Tensor:
        return mean_square(torch.tanh((x * self.small) @ self.large.t()))
