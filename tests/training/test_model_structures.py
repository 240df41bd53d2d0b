"""Modules whose structure is hard for ZeRO-3's hooks train like plain torch, also where partitions are padding only."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.zero3.setup.validation import check_model
from tests.helpers.hard_models import WIDTH, Case, Trained
from tests.helpers.hard_structures import Reused, Shapes
from tests.helpers.long_cases import long_but
from tests.helpers.ranks import on_ranks
from tests.training.model_cases import CASES, STRUCTURES
from tests.training.model_runs import assert_trains_like_torch, on_each_rank, train_near_storage

# Two processes train these in turn.
LONG = {
    "empty parameter groups",
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
    "empty parameter groups",
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
