"""A module compiled in place trains like plain torch, and wrappers of torch.compile are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_smartinfinity import UnsupportedError
from tests.helpers.hard_models import WIDTH, Case
from tests.helpers.hard_structures import Stack
from tests.training.model_runs import assert_trains_like_torch, train_near_storage, trainer_for


class Inner(nn.Module):
    """A submodule to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Eager(Stack):
    """A module without compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class CompiledInPlace(Eager):
    """A module that compiles its submodule in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.compile(backend="aot_eager")


class Tied(Stack):
    """A module that uses a weight of its submodule."""

    compiled = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = TiedInner()
        if self.compiled:
            self.inner.compile(backend="aot_eager")

    def middle(self, x: torch.Tensor, when: int) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class TiedInner(Inner):
    """A submodule that ends with a weight of its own submodule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tanh(self.up(x)) @ self.up.weight


class CompiledTied(Tied):
    """The same, compiled in place."""

    compiled = True


class CompiledWrapper(Eager):
    """A module that replaces its submodule by a compiled wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(self.inner, backend="eager")  # type: ignore[assignment]


def test_a_module_compiled_in_place_trains_like_torch(tmp_path: Path) -> None:
    """Graphs break at ZeRO-3's hooks, which gather and release parameters. The parts between the hooks are compiled.

    Our classes of parameters break none.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trained = train_near_storage(Case(CompiledInPlace), tmp_path)
    assert counters["stats"]["calls_captured"] > 0
    assert counters["graph_break"] and not [why for why in counters["graph_break"] if "partitioned_parameter" in why]
    assert_trains_like_torch(Case(Eager), trained)


def test_a_compiled_module_uses_a_weight_of_its_submodule(tmp_path: Path) -> None:
    """The graph breaks there."""
    torch._dynamo.reset()
    assert_trains_like_torch(Case(Tied), train_near_storage(Case(CompiledTied), tmp_path))


def test_a_compiled_wrapper_within_the_module_is_refused(tmp_path: Path) -> None:
    """The wrapper hides the parameters from ZeRO-3's hooks. Stock fails on an attribute in the first forward."""
    with pytest.raises(UnsupportedError, match=r"'inner' is wrapped by torch.compile.*module.compile"):
        train_near_storage(Case(CompiledWrapper), tmp_path)


def test_a_compiled_lightning_module_is_refused_by_lightning(tmp_path: Path) -> None:
    """Lightning allows compiled modules only for strategies on its own list."""
    case = Case(Eager)
    with pytest.raises(RuntimeError, match="compiled model is incompatible"):
        trainer_for(case, tmp_path).fit(torch.compile(case.module(), backend="eager"))  # type: ignore[arg-type]
