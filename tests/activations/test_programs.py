"""Random models, settings and orders of forwards and backwards give the same bits with and without offloading."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_smartinfinity import ActivationOffload, ConfigError
from lightning_smartinfinity.activations import ActivationTraffic, OffloadedActivations, paused
from tests.activations.chains import assert_nothing_is_left
from tests.activations.models import Block, opened
from tests.helpers.long_cases import long_but
from tests.helpers.unnamed import unnamed_files
from tests.helpers.waiting import join

# Seven programs from this one on have every layer and every kind of step.
# ACTIVATION_PROGRAMS=400 makes a longer search.
FIRST_PROGRAM = 3591
NUM_PROGRAMS = int(os.environ.get("ACTIVATION_PROGRAMS", "7"))

WIDTH = 16
BLOCK = 4096

Layer = Callable[[torch.Tensor], torch.Tensor]


# ---- layers: from a batch of sequences to one of the same shape


class Composed(nn.Module):
    """A function and the modules that it uses."""

    def __init__(self, run: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, *self.parts)


def convolution() -> nn.Module:
    """Return a convolution, a normalization with buffers, and an operation in place."""
    layers = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
    return Composed(lambda x, layers: layers(x.transpose(1, 2)).transpose(1, 2), layers)


class Keeping(nn.Module):
    """A layer that keeps what it has computed until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x).sin()
        self.kept = found.detach()  # the graph would never go: a checkpoint of this layer keeps the layer
        return found * x


class Function(torch.autograd.Function):
    """Saves its input, its output and integers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        values, places = x.sort(-1)
        ctx.save_for_backward(x, values, places)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, values, places = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(-1, places, gradient + values) + x


def views(x: torch.Tensor) -> torch.Tensor:
    square = x.transpose(1, 2) @ x
    left, right = x[:, ::2], x.flip(1)[:, ::2]
    wide = x.mean(1, keepdim=True).expand_as(x)
    return x @ square.softmax(-1).transpose(1, 2) + wide * x + F.pad((left * right).sum(1, keepdim=True), (0, 0)) * x


def in_place(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sigmoid_().mul(x).relu_()


def complex_numbers(x: torch.Tensor) -> torch.Tensor:
    z = torch.fft.fft(x)
    return (1 + (z * z.conj()).real).sqrt() + z.exp().conj().imag


def mixed(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.transpose(1, 2) @ x).float()


def without_hooks(x: torch.Tensor) -> torch.Tensor:
    with paused():
        return x * x.cos()


def with_others(x: torch.Tensor) -> torch.Tensor:
    # torch's save_on_cpu would leak what lies on the CPU already.
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda saved: saved):
        return x * x.tanh()


def with_penalty(x: torch.Tensor) -> torch.Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    (slope,) = torch.autograd.grad(x.sin().square().sum(), x, create_graph=True)
    return x + slope


LAYERS: dict[str, Callable[[], Layer]] = {
    "perceptron": lambda: nn.Sequential(
        nn.Linear(WIDTH, 40), nn.GELU(), nn.Dropout(0.3), nn.Linear(40, WIDTH), nn.LayerNorm(WIDTH)
    ),
    "attention": lambda: Block(WIDTH, 2, dropout=0.2),
    "convolution": convolution,
    "recurrent": lambda: Composed(lambda x, layer: layer(x)[0], nn.GRU(WIDTH, WIDTH, batch_first=True)),
    # An embedding, which saves integers, whose weight is shared with a projection.
    "words": lambda: Composed(
        lambda x, words: x + words(x.detach().argmax(-1)) @ words.weight.t(), nn.Embedding(WIDTH, WIDTH)
    ),
    # A weight that is used twice, the second time transposed.
    "twice": lambda: Composed(lambda x, layer: F.linear(F.tanh(layer(x)), layer.weight.t()), nn.Linear(WIDTH, WIDTH)),
    "keeping": Keeping,
    "function": lambda: Function.apply,
    "views": lambda: views,
    "in place": lambda: in_place,
    "complex": lambda: complex_numbers,
    "mixed": lambda: mixed,
    "without hooks": lambda: without_hooks,
    "with others": lambda: with_others,
    "with penalty": lambda: with_penalty,
}


class Failure(Exception):
    """Raised on purpose."""


def fail(gradient: torch.Tensor) -> None:
    raise Failure


class Model(nn.Module):
    """Layers, each of which may be checkpointed.

    Args:
        layers: The names of the layers, and how each is called: plainly, or by a kind of checkpoint.

    Attributes:
        fails_at: The number of the layer before which the next forward or backward fails.
    """

    def __init__(self, layers: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self.layers: list[tuple[Layer, str]] = [(LAYERS[name](), how) for name, how in layers]
        self.modules_of_layers = nn.ModuleList(each for each, _ in self.layers if isinstance(each, nn.Module))
        self.fails_at: int | None = None
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()  # which the first layer may change
        x = x * 1.5
        for number, (layer, how) in enumerate(self.layers):
            if number == self.fails_at and self.fails_in == "forward":
                raise Failure
            if number == self.fails_at and self.fails_in == "backward":
                x.register_hook(fail)
            x = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=how == "reentrant")
            x = x / (1 + x.detach().abs().amax())
        return x.square().sum()


# ---- programs


@dataclass(frozen=True)
class Step:
    """Draws what happens between two updates.

    Args:
        kind: The function of ``KINDS`` that is called.
        shapes: The shapes of the batches.
        at: Where it fails, if it does.
    """

    kind: str
    shapes: tuple[tuple[int, int], ...]
    at: int


@dataclass(frozen=True)
class Program:
    """A training: its model, how it is offloaded, and its steps."""

    layers: tuple[tuple[str, str], ...]
    settings: ActivationOffload
    faults: dict[str, int]
    steps: tuple[Step, ...]


Forward = Callable[[torch.Tensor], torch.Tensor]


def each_alone(model: Model, forward: Forward, batches: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        losses.append(forward(batch))
        losses[-1].backward()
    return losses


def all_at_once(model: Model, forward: Forward, batches: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    losses = [forward(batch) for batch in batches]
    torch.stack(losses).sum().backward()
    return losses


def oldest_first(model: Model, forward: Forward, batches: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    losses = [forward(batch) for batch in batches]
    for loss in losses:
        loss.backward()
    return losses


def retained(model: Model, forward: Forward, batches: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    losses = [forward(batch) for batch in batches]
    for _ in range(at):
        for loss in losses:
            loss.backward(retain_graph=True)
    return losses


def dropped(model: Model, forward: Forward, batches: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    return [forward(batch).detach() for batch in batches]


def evaluated(model: Model, forward: Forward, batches: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    model.eval()
    with torch.no_grad():
        losses = [forward(batch) for batch in batches]
    model.train()
    return losses + each_alone(model, forward, batches, at)


def in_another_thread(model: Model, forward: Forward, batches: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    losses = [forward(batch) for batch in batches]
    thread = threading.Thread(target=lambda: [loss.backward() for loss in losses])
    thread.start()
    join(thread)
    return losses


def failing(where: str, model: Model, forward: Forward, batches: list[torch.Tensor], at: int) -> list[torch.Tensor]:
    model.fails_at, model.fails_in = at % len(model.layers), where
    for batch in batches:
        with suppress(Failure):
            forward(batch).backward()
    model.fails_at = None
    return each_alone(model, forward, batches, at)


KINDS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "each alone": each_alone,
    "all at once": all_at_once,
    "oldest first": oldest_first,
    "retained": retained,
    "dropped": dropped,
    "evaluated": evaluated,
    "in another thread": in_another_thread,
    "failing in forward": partial(failing, "forward"),
    "failing in backward": partial(failing, "backward"),
}


def random_settings(choose: random.Random) -> ActivationOffload:
    """Return settings that do not contradict each other."""
    while True:
        with suppress(ConfigError):
            return ActivationOffload(
                keep=choose.choice(["auto", "auto", 0, 1, 5000, 10**9]),
                budget_bytes=choose.choice([None, None, BLOCK, 2 * BLOCK, 5 * BLOCK, 20 * BLOCK, 10**9]),
                host_bytes=choose.choice(["auto", BLOCK, 2 * BLOCK, 3 * BLOCK, 10 * BLOCK, 64 * BLOCK]),
                storage_bytes=choose.choice([None, None, BLOCK, 2 * BLOCK, 7 * BLOCK, 50 * BLOCK]),
                min_bytes=choose.choice([1, 1, 1, 17, 1000, BLOCK, 5000]),
                verify=choose.random() < 0.5,
            )


def program(seed: int) -> Program:
    """Return a random program."""
    choose = random.Random(str(seed))  # small integer seeds begin alike
    layers = tuple(
        (choose.choice(list(LAYERS)), choose.choice(["plain", "plain", "plain", "reentrant", "not reentrant"]))
        for _ in range(choose.randint(1, 5))
    )
    shapes = [(choose.randint(1, 4), choose.choice([2, 8, 24])) for _ in range(choose.choice([1, 1, 2, 4]))]
    steps = tuple(
        Step(
            choose.choice(list(KINDS)),
            tuple(choose.choice(shapes) for _ in range(choose.choice([1, 1, 2, 3]))),
            choose.randint(1, 4),
        )
        for _ in range(choose.randint(3, 6))
    )
    faults = {"seed": seed, "max_delay_us": choose.choice([0, 0, 200, 1000]), "short_transfer_every": 3}
    return Program(layers, random_settings(choose), faults if choose.random() < 0.6 else {}, steps)


def train(drawn: Program, activations: OffloadedActivations | None = None) -> list[torch.Tensor]:
    """Return the losses, gradients and parameters of all steps."""
    torch.manual_seed(0)
    model = Model(drawn.layers)
    if activations is not None:
        activations.module = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if [*model.parameters()] else None

    def forward(batch: torch.Tensor) -> torch.Tensor:
        with nullcontext() if activations is None else activations.forward(batch):
            return model(batch)

    seen: list[torch.Tensor] = []
    for step in drawn.steps:
        batches = [torch.randn(*shape, WIDTH, requires_grad=True) for shape in step.shapes]
        seen += [loss.detach() for loss in KINDS[step.kind](model, forward, batches, step.at)]
        seen += [each.grad.clone() for each in (*batches, *model.parameters()) if each.grad is not None]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        seen += [each.detach().clone() for each in model.state_dict().values()]
        if activations is not None:
            assert_nothing_is_left(activations)
    assert not any(bool(each.isnan().any()) for each in seen), "the program tells nothing"
    return seen


def traffic_of(drawn: Program, folder: Path) -> ActivationTraffic:
    """Train a program with and without offloading, compare all bits, and return what was counted.

    Files are in two folders, and have no names.
    """
    expected, folders = train(drawn), [folder / "a", folder / "b"]
    with opened(folders, drawn.settings, faults=drawn.faults) as activations:
        found = train(drawn, activations)
        assert [len(unnamed_files(each)) for each in folders] == [1, 1]
        assert not any(path.is_file() for path in folder.rglob("*"))
        traffic = activations.traffic()
    pairs = zip(found, expected, strict=True)
    assert [number for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)] == [], drawn
    assert min(asdict(traffic).values()) >= 0, (drawn, traffic)
    assert activations.host_bytes == 0
    return traffic


@pytest.mark.filterwarnings("ignore:None of the inputs", "ignore:.*is not kept")
@pytest.mark.parametrize(
    ("first", "number"), long_but([(FIRST_PROGRAM, NUM_PROGRAMS)], [(FIRST_PROGRAM, NUM_PROGRAMS), (0, 300)])
)
def test_any_program_gives_the_same_bits(tmp_path: Path, first: int, number: int) -> None:
    """Losses, gradients, parameters and buffers stay the same, and after each step nothing is left.

    Programs drop graphs, keep them, fail in forward and in backward, and run backward in another thread.
    """
    traffic = [traffic_of(program(seed), tmp_path) for seed in range(first, first + number)]
    for name in ("read_bytes", "forwarded_bytes", "kept_bytes", "kept_for_room_bytes", "deduplicated"):
        assert sum(getattr(each, name) for each in traffic) > 0, name
