"""A module compiled in place trains like plain torch, and wrappers of torch.compile are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smartinfinity import UnsupportedError
from tests.helpers.hard_models import WIDTH, Case
from tests.helpers.hard_structures import Stack
from tests.training.model_runs import assert_trains_like_torch, train_near_storage


class Inner(nn.Module):
    """A submodule to compile, which may end with a weight of its own submodule."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.up, self.down, self.tied = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        return self.down(hidden) + hidden @ self.up.weight if self.tied else self.down(hidden)


class Compiled(Stack):
    """A module with a submodule that may be compiled in place or wrapped."""

    def __init__(self, compile_it: Callable[[Inner], Any] = lambda inner: inner, *, tied: bool = False) -> None:
        super().__init__()
        self.layer = compile_it(Inner(tied=tied))


def in_place(inner: Inner) -> Inner:
    inner.compile(backend="aot_eager")
    return inner


@pytest.mark.parametrize("tied", [False, True])
def test_a_module_compiled_in_place_trains_like_torch(tied: bool, tmp_path: Path) -> None:
    """Graphs break at ZeRO-3's hooks, which gather and release parameters. The parts between the hooks are compiled.

    Our classes of parameters break none, but where a weight of a submodule is used.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trained = train_near_storage(Case(partial(Compiled, in_place, tied=tied), steps=2), tmp_path)
    assert counters["stats"]["calls_captured"] > 0
    assert counters["graph_break"]
    assert tied or not [why for why in counters["graph_break"] if "partitioned_parameter" in why]
    assert_trains_like_torch(Case(partial(Compiled, tied=tied), steps=2), trained)


def test_a_compiled_wrapper_within_the_module_is_refused(tmp_path: Path) -> None:
    """The wrapper hides the parameters from ZeRO-3's hooks. Stock fails on an attribute in the first forward."""
    wrapped = partial(Compiled, partial(torch.compile, backend="eager"))
    with pytest.raises(UnsupportedError, match=r"'layer' is wrapped by torch.compile.*module.compile"):
        train_near_storage(Case(wrapped), tmp_path)
