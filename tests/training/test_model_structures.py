"""Modules that are hard for ZeRO-3: structures, graphs, unused parameters and compilation train like plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.setup.validation import check_model
from tests.helpers.hard_modules import WIDTH, Case, Reused, Shapes, Stack, Trained, TwoBackwards
from tests.helpers.long_cases import long_but
from tests.helpers.ranks import on_ranks
from tests.training.model_cases import CASES, CHECKPOINTS, GRAPHS, STRUCTURES, UNUSED
from tests.training.model_runs import assert_trains_like_torch, on_each_rank, train_near_storage, trainer_for

# Two processes train these in turn.
LONG = {
    "adapters, and an empty parameter group",
    "parameters in containers",
    "a tensor larger than ring and sub-group",
    "a module in two parents",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in STRUCTURES])
def test_hard_structures_train_like_torch(name: str, tmp_path: Path) -> None:
    """Modules used several times, tied, nested, partly frozen, or with tensors of unusual sizes train like torch."""
    assert_trains_like_torch(STRUCTURES[name], train_near_storage(STRUCTURES[name], tmp_path))


class WithBias(Reused):
    """A module whose layer has a bias of equal elements.

    Args:
        expanded: Whether it is one element, expanded.
    """

    def __init__(self, *, expanded: bool) -> None:
        super().__init__()
        self.layer.bias = nn.Parameter(torch.full((1,), 0.5).expand(WIDTH) if expanded else torch.full((WIDTH,), 0.5))


def test_an_expanded_parameter_gets_elements_of_its_own(tmp_path: Path) -> None:
    """Torch's optimizers refuse to update such a parameter in place. Here it trains as its copy would."""
    trained = train_near_storage(Case(partial(WithBias, expanded=True)), tmp_path)
    assert_trains_like_torch(Case(partial(WithBias, expanded=False)), trained)


class TiedByData(Reused):
    """A module with two parameters that share one memory, which a plain optimizer would update twice."""

    def __init__(self) -> None:
        super().__init__()
        self.back.weight.data = self.front.weight.data


def test_parameters_over_the_same_memory_are_refused(tmp_path: Path) -> None:
    """ZeRO-3 would untie them silently. The error names both."""
    with pytest.raises(UnsupportedError, match=r"'back.weight' and 'front.weight' share memory"):
        train_near_storage(Case(TiedByData), tmp_path)


def test_empty_parameters_are_refused_at_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's gather would fail on them in the middle of the first forward."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match=r"'empties.0' has no elements"):
        check_model(Shapes(empty=True))
    check_model(Shapes())


def test_parameters_of_several_dtypes_are_reported() -> None:
    """DeepSpeed casts an fp32 norm in a bf16 model. A warning gives an example of each dtype."""
    module = Reused().bfloat16()
    check_model(module)
    module.layer.float()
    with pytest.warns(UserWarning, match=r"'front.weight' is torch.bfloat16, 'layer.weight' is torch.float32"):
        check_model(module)


ON_TWO = (
    "tensors of odd sizes and not contiguous",
    "adapters, and an empty parameter group",
    "a tensor larger than ring and sub-group",
    "reentrant, accumulating",
    "by one micro-batch",
    "losses balanced by their slopes",
)
ALL_ON_TWO = (
    *ON_TWO,
    "a module in two parents",
    "parameters in containers",
    "nested outputs",
    "reentrant, one bucket",
    "reentrant, bf16",
    "in bf16",
    "a gradient penalty",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Trained]:
    """Train every case of these tests in turn in one pair of processes."""
    names = ALL_ON_TWO if request.config.getoption("long") else ON_TWO
    return on_ranks(on_each_rank, tmp_path_factory.mktemp("two"), *names)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", long_but(ON_TWO, ALL_ON_TWO))
def test_two_processes_train_like_torch(name: str, trained: dict[str, Trained]) -> None:
    """Rank 0's losses, the masters and the update counts equal those of one torch process on both ranks' batches."""
    assert_trains_like_torch(CASES[name], trained[name], world_size=2)


# Two processes train the others in turn, or another case has the same in another precision.
LONG_GRAPHS = ("a gradient penalty", "losses balanced by their slopes")


@pytest.mark.parametrize("name", long_but([name for name in GRAPHS if name not in LONG_GRAPHS], GRAPHS))
def test_unusual_graphs_train_like_torch(name: str, tmp_path: Path) -> None:
    """Parameters are gathered for retained graphs and for gradients of gradients.

    Stock ZeRO-3 has released them by then, and fails on shapes in the middle of the second backward.
    """
    assert_trains_like_torch(GRAPHS[name], train_near_storage(GRAPHS[name], tmp_path))


class Differentiable(TwoBackwards):
    """A module that asks for differentiable gradients of its parameters."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(self.case.batch(0), 0), create_graph=True)


def test_differentiable_gradients_of_parameters_are_refused(tmp_path: Path) -> None:
    """Gradients move to the arena as soon as they arrive. The error names torch.autograd.grad instead."""
    with pytest.raises(UnsupportedError, match=r"backward\(create_graph=.*torch.autograd.grad"):
        train_near_storage(Case(Differentiable), tmp_path)


# Two processes train the others in turn, or another case has the same in another precision.
LONG_UNUSED = ("in bf16", "by one micro-batch", "by another module")


@pytest.mark.parametrize("name", long_but([name for name in UNUSED if name not in LONG_UNUSED], UNUSED))
def test_parameters_unused_for_some_steps_train_like_torch(name: str, tmp_path: Path) -> None:
    """A step without a gradient applies no decay, no moment and no count to a parameter.

    This covers parameters used alternately, late, by one micro-batch, or never. Stock DeepSpeed applies the last
    gradient again, and weight decay.
    """
    assert_trains_like_torch(UNUSED[name], train_near_storage(UNUSED[name], tmp_path))


def test_resuming_keeps_every_count(tmp_path: Path) -> None:
    """A run resumed after three steps has the losses, masters and counts of an uninterrupted run, bit for bit."""
    case = UNUSED["by one micro-batch in bf16"]
    straight = train_near_storage(case, tmp_path / "straight")
    first = dataclasses.replace(case, steps=3)
    trainer = trainer_for(first, tmp_path / "first")
    trainer.fit(first.module())
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    resumed = train_near_storage(case, tmp_path / "resumed", ckpt_path=str(tmp_path / "three.ckpt"))
    assert resumed.steps == straight.steps
    assert resumed.losses == straight.losses[3 * case.accumulate :]
    for name, master in straight.masters.items():
        assert torch.equal(resumed.masters[name], master), name


class Compiled(Stack):
    """A module with a submodule that may be compiled in place or wrapped."""

    def __init__(self, compile_it: Callable[[nn.Module], Any] = lambda inner: inner) -> None:
        super().__init__()
        self.layer = compile_it(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)))


def in_place(inner: nn.Module) -> nn.Module:
    inner.compile(backend="aot_eager")
    return inner


def test_a_module_compiled_in_place_trains_like_torch(tmp_path: Path) -> None:
    """Graphs break at ZeRO-3's hooks, which gather and release parameters. The parts between the hooks are compiled.

    Our classes of parameters break none.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trained = train_near_storage(Case(partial(Compiled, in_place), steps=2), tmp_path)
    assert counters["stats"]["calls_captured"] > 0
    assert counters["graph_break"]
    assert not [why for why in counters["graph_break"] if "partitioned_parameter" in why]
    assert_trains_like_torch(Case(Compiled, steps=2), trained)


def test_a_compiled_wrapper_within_the_module_is_refused(tmp_path: Path) -> None:
    """The wrapper hides the parameters from ZeRO-3's hooks. Stock fails on an attribute in the first forward."""
    wrapped = partial(Compiled, partial(torch.compile, backend="eager"))
    with pytest.raises(UnsupportedError, match=r"'layer' is wrapped by torch.compile.*module.compile"):
        train_near_storage(Case(wrapped), tmp_path)


# ---- one process on a CPU has nothing to reduce, so its gradients bypass DeepSpeed's buckets without changing results


PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
ODD = STRUCTURES["tensors of odd sizes and not contiguous"]
BYPASSING = {
    **{f"odd shapes, {precision}": dataclasses.replace(ODD, precision=precision, clip=0.5) for precision in PRECISIONS},
    "odd shapes, accumulating": dataclasses.replace(ODD, precision="bf16-mixed", accumulate=3),
    "one weight in three places": STRUCTURES["one weight in three places"],
    "reentrant": dataclasses.replace(CHECKPOINTS["reentrant, bf16"], zero={}),
    "unused": UNUSED["by one micro-batch in bf16"],
    "retained": GRAPHS["one forward, two backwards"],
    "penalty": GRAPHS["a gradient penalty in bf16"],
}
USUAL = ("odd shapes, 32-true", "odd shapes, accumulating", "reentrant", "unused", "retained", "penalty")


@pytest.mark.parametrize("name", long_but(USUAL, BYPASSING))
def test_same_bits_with_and_without_buckets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, masters and update counts are the same bit for bit."""
    straight = train_near_storage(BYPASSING[name], tmp_path / "straight")
    reduced: list[int] = []
    reduce = StorageOptimizer.partition_grads
    monkeypatch.setattr(
        StorageOptimizer, "partition_grads", lambda *args: (reduced.append(len(args[1])), reduce(*args))[1]
    )
    monkeypatch.setattr(GradientPath, "bypasses_buckets", False)
    bucketed = train_near_storage(BYPASSING[name], tmp_path / "bucketed")
    assert straight.losses == bucketed.losses and straight.steps == bucketed.steps
    assert max(reduced) > 1, "no gradients were reduced together"
    for master, expected in zip(straight.masters.values(), bucketed.masters.values(), strict=True):
        assert torch.equal(master, expected)


# ---- activation checkpointing with weights shared between the segments trains like plain torch


# Two processes train the others in turn.
USUAL_CHECKPOINTS = ("reentrant, small buckets", "not reentrant", "selective")


@pytest.mark.parametrize("name", long_but(USUAL_CHECKPOINTS, CHECKPOINTS))
def test_shared_weights_under_checkpoints_train_like_torch(name: str, tmp_path: Path) -> None:
    """Each arrival of a shared weight's gradient counts once, before or after its bucket has left.

    Stock DeepSpeed keeps the last arrival only, or fails an assertion if two fall into one bucket.
    """
    assert_trains_like_torch(CHECKPOINTS[name], train_near_storage(CHECKPOINTS[name], tmp_path))
