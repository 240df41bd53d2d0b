"""Parameters on storage hold ``parameter_bytes`` of memory at most, and change no bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.native import MemoryPool
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks
from lightning_smartinfinity.zero3.parameters import param_swapper
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper, stored_parameter
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import run_module
from tests.helpers.trainers import quiet_trainer
from tests.training.test_lives import Evaluated
from tests.training.test_offloaded_parameters import SMALL_RING, Configured, assert_same, result
from tests.training.worker import Run, train

NVME = {"offload_param": {"device": "nvme"}}
RECIPE = Recipe(precision="bf16-mixed", width=64, depth=4, groups=True, accumulate=2, frozen=True, max_steps=4)


def run_of(root: Path, recipe: Recipe, budget: int | None, **options: Any) -> Run:
    zero = {} if budget is None else {"zero": NVME}
    transfer = {} if budget is None else {"parameter_bytes": budget}
    return Run(out=str(root), recipe=recipe, transfer={**SMALL_RING, **transfer}, options={**zero, **options})


def least_budget(root: Path, recipe: Recipe) -> int:
    """Return what the error says that a model needs."""
    strategy = SmartInfinityStrategy(root / "s", zero=NVME, transfer={"parameter_bytes": 1})
    with pytest.raises(ConfigError, match="parameter_bytes=1") as caught:
        quiet_trainer(root, strategy, precision=recipe.precision).fit(LitTiny(recipe))
    assert not (root / "s").exists()
    return int(re.search(r"at least (\d+)", caught.value.remedy)[1])  # type: ignore[index]


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The largest number of bytes in memory for parameters so far."""
    peak, original = [0], param_swapper.lent_tensor

    def lend(pool: MemoryPool, nbytes: int) -> torch.Tensor:
        taken = original(pool, nbytes)
        peak[0] = max(peak[0], pool.nbytes)
        return taken

    monkeypatch.setattr(param_swapper, "lent_tensor", lend)
    return peak


@pytest.mark.parametrize(
    ("times", "tied", "overlap"),
    long_but(
        [(1, True, "forward")],
        itertools.product([1, 2], [False, True], ["none", "forward", "backward"]),
    ),
)
def test_no_bit_changes_and_no_byte_is_beyond_the_budget(
    times: float, tied: bool, overlap: str, tmp_path: Path, most: list[int]
) -> None:
    """What lies in memory for parameters never exceeds the budget, with one that holds the largest module only, too."""
    recipe = dataclasses.replace(RECIPE, tied=tied)
    straight = result(run_of(tmp_path / "straight", recipe, None, overlap="none"))
    assert most == [0]
    budget = times * least_budget(tmp_path, recipe)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*in use at once")
        assert_same(result(run_of(tmp_path / "budget", recipe, budget, overlap=overlap)), straight)
    assert 0 < most[0] <= budget


def test_without_a_budget(tmp_path: Path, most: list[int]) -> None:
    """DeepSpeed's own settings hold more than the budget that would do."""
    zero = {**NVME, "stage3_param_persistence_threshold": 0}
    result(run_of(tmp_path / "auto", RECIPE, None, zero=zero))
    assert most[0] > 2 * least_budget(tmp_path, RECIPE)


class Written(pl.Callback):
    """A callback that notes how many bytes of parameters have been written after each step."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.drain()
        self.after.append(strategy._parameters.store.counters().written_bytes)


@pytest.mark.parametrize("overlap", long_but(["backward"], ["none", "forward", "backward"]))
def test_each_parameter_is_written_once_in_a_step(overlap: str, tmp_path: Path) -> None:
    """A step writes as many bytes as the parameters that it updates have on storage."""
    written = Written()
    run = run_of(tmp_path, dataclasses.replace(RECIPE, accumulate=1), 100_000, overlap=overlap)
    module, trainer, _ = train(run, written)
    trainer.strategy.close()  # type: ignore[attr-defined]
    stored = [(stored_parameter(param), param.requires_grad) for param in module.parameters()]
    nbytes = sum(whole_blocks(each.nbytes) for each, updated in stored if each is not None and updated)
    assert nbytes > 0 and [b - a for a, b in itertools.pairwise(written.after)] == 3 * [nbytes]


def test_parameters_are_read_before_their_module_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step has shown in which order modules run, each read begins while another module gets its parameters."""
    reads: dict[tuple[int, bool, bool], set[str]] = defaultdict(set)  # by step, by pass, and whether ahead of use
    gathering: list[Any] = []
    fetch, start = PartitionedParameterCoordinator.fetch_sub_module, ParameterSwapper._start_reads

    def fetching(coordinator: Any, sub_module: Any, forward: bool) -> None:
        gathering[:] = [forward, set(sub_module.parameters(recurse=False))]
        fetch(coordinator, sub_module, forward)

    def starting(swapper: ParameterSwapper, params: Any) -> None:
        names = {param: name for name, param in module.named_parameters()}
        for param in params if gathering else ():
            reads[module.trainer.global_step, gathering[0], param not in gathering[1]].add(names[param])
        start(swapper, params)

    monkeypatch.setattr(PartitionedParameterCoordinator, "fetch_sub_module", fetching)
    monkeypatch.setattr(ParameterSwapper, "_start_reads", starting)
    strategy = SmartInfinityStrategy(
        tmp_path / "s", zero=NVME, overlap="none", transfer={**SMALL_RING, "parameter_bytes": 100_000}
    )
    module = LitTiny(dataclasses.replace(RECIPE, accumulate=1, tied=False))
    quiet_trainer(tmp_path, strategy, precision=RECIPE.precision, max_steps=3).fit(module)
    strategy.close()
    stored = {name for name, param in module.named_parameters() if stored_parameter(param) is not None}
    for forward in (True, False):
        assert reads[0, forward, False] == stored and not reads[0, forward, True]
        assert not reads[2, forward, False]
    # What the end of forward has used is still in memory when backward begins.
    assert reads[2, True, True] == stored and len(reads[2, False, True]) > len(stored) // 2


@pytest.mark.parametrize("times", long_but([1], [1, 2]))
def test_two_processes(times: int, tmp_path: Path) -> None:
    """Gathered parameters and partitions together never exceed the budget of a rank, and no bit changes."""
    outcomes = []
    # Whole blocks of half of the largest tensor, of 64 * 256 elements, and of its bias; and twice as much gathered.
    least = 3 * (64 * 256 + 4096)
    for budget in (0, times * least):
        root = tmp_path / str(budget)
        root.mkdir()
        done = run_module("tests.training.parameter_budget_worker", root, str(budget), ranks=2)
        assert done.returncode == 0, done.stdout + done.stderr
        outcomes.append([json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(2)])
        for outcome in outcomes[-1] if budget else ():
            assert outcome["warnings"] == [] and 0 < outcome["most"] <= budget
    plain, budgeted = ([outcome["losses"] for outcome in of_ranks] for of_ranks in outcomes)
    assert budgeted == plain


def test_a_model_that_is_built_on_storage(tmp_path: Path, most: list[int]) -> None:
    """The budget holds while configure_model builds, too; a parameter that does not fit is named there."""
    module = Configured(dataclasses.replace(RECIPE, accumulate=1, max_steps=1))
    strategy = SmartInfinityStrategy(tmp_path / "s", zero=NVME, transfer={"parameter_bytes": 20_000})
    trainer = quiet_trainer(tmp_path, strategy, max_steps=1, precision=RECIPE.precision)
    with pytest.raises(ConfigError, match=r"parameter_bytes=20000\).*'Linear.weight' takes 24576 bytes.") as caught:
        trainer.fit(module)
    assert "at least 24576" in caught.value.remedy
    budget = least_budget(tmp_path / "whole", RECIPE)
    strategy = SmartInfinityStrategy(tmp_path / "s", zero=NVME, transfer={"parameter_bytes": budget})
    quiet_trainer(tmp_path, strategy, max_steps=1, precision=RECIPE.precision).fit(Configured(module.recipe))
    assert 0 < most[0] <= budget
    strategy.close()


class Initialised(Configured):
    """Initialises the model's parameters once all of it is built, as models of transformers do."""

    def configure_model(self) -> None:
        super().configure_model()
        for param in self.model.parameters():  # type: ignore[union-attr]
            torch.nn.init.normal_(param, std=0.02)


def test_parameters_that_are_initialised_when_the_model_is_built(tmp_path: Path, most: list[int]) -> None:
    """Parameters that are gathered to be written to keep the budget, and have the values that they have in memory."""
    recipe = dataclasses.replace(RECIPE, accumulate=1, max_steps=2)
    budget = least_budget(tmp_path / "whole", recipe)
    losses = []
    for zero, transfer in ((None, {}), (NVME, {"parameter_bytes": budget})):
        strategy = SmartInfinityStrategy(tmp_path / str(zero is None), zero=zero, transfer=transfer)
        torch.manual_seed(3)
        module = Initialised(recipe)
        quiet_trainer(tmp_path, strategy, max_steps=2, precision=recipe.precision).fit(module)
        losses.append(module.losses)
        strategy.close()
    assert losses[0] == losses[1] and 0 < most[0] <= budget


def test_an_evaluation(tmp_path: Path, most: list[int]) -> None:
    """An evaluation keeps the budget, and finds what it finds without one."""
    found = []
    budget = least_budget(tmp_path, RECIPE)
    for nbytes in (budget, "auto"):
        strategy = SmartInfinityStrategy(tmp_path / "s", zero=NVME, transfer={"parameter_bytes": nbytes})
        trainer = quiet_trainer(tmp_path, strategy, limit_val_batches=4, precision=RECIPE.precision)
        found.append(trainer.validate(Evaluated(RECIPE), verbose=False))
        assert nbytes == "auto" or 0 < most[0] <= budget
        strategy.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("width", "budget", "named", "least"),
    [
        (64, 32_767, r"'model.blocks.0.up.weight' takes 32768 bytes", 36_864),
        (64, 33_000, r"'model.blocks.0.up.weight', 'model.blocks.0.up.bias' are used together, and take 33280", 36_864),
    ],
    ids=["a tensor", "a module"],
)
def test_what_does_not_fit_is_named(width: int, budget: int, named: str, least: int, tmp_path: Path) -> None:
    """The largest tensor is named if it does not fit by itself, otherwise the parameters that are used together."""
    strategy = SmartInfinityStrategy(tmp_path / "s", zero=NVME, transfer={"parameter_bytes": budget})
    trainer = quiet_trainer(tmp_path, strategy, precision="bf16-true")
    with pytest.raises(ConfigError, match=rf"parameter_bytes={budget}\) is too little .*{named}") as caught:
        trainer.fit(LitTiny(Recipe(width=width, depth=1)))
    assert caught.value.remedy == f"Pass at least {least}."
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("zero", "named"),
    [
        (None, "needs parameters on storage"),
        ({"offload_param": {"device": "cpu"}}, "needs parameters on storage"),
        ({**NVME, "stage3_max_live_parameters": 5}, "'stage3_max_live_parameters': ...} follows from"),
        ({**NVME, "prefetch_bucket_size": 5}, "'prefetch_bucket_size': ...} follows from"),
        ({"offload_param": {"device": "nvme", "buffer_count": 5}}, "'buffer_count': ...}} follows from"),
    ],
)
def test_settings_that_contradict_it(zero: dict[str, Any] | None, named: str, tmp_path: Path) -> None:
    """What follows from the budget is not set beside it, and parameters have to lie on storage."""
    with pytest.raises(ConfigError, match=re.escape(named)):
        SmartInfinityStrategy(tmp_path, zero=zero, transfer={"parameter_bytes": "1MB"})
