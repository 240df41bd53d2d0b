"""A budget bounds the parameters in host memory, whatever the model's size, and changes no bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.native import MemoryPool
from lightning_smartinfinity.zero3.parameters import param_swapper
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.test_overlap import assert_same, result
from tests.training.worker import Run, launch, train

RECIPE = Recipe(precision="bf16-mixed", depth=6, width=64, max_steps=3, clip=0.5, accumulate=2)
BUDGET = 96 << 10  # three of the largest parameters
TRANSFER = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
# Everything is stored that may be.
STORED = {"stage3_param_persistence_threshold": 0}


def run_of(out: Path, *, budget: int | None, recipe: Recipe = RECIPE, **options: Any) -> Run:
    transfer = TRANSFER if budget is None else {**TRANSFER, "parameter_bytes": budget}
    return Run(out=str(out), recipe=recipe, transfer=transfer, options={"zero": STORED, **options})


class Most:
    """Watches the memory that the swapper lends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        original = param_swapper.lent_tensor

        def lend(pool: MemoryPool, nbytes: int) -> torch.Tensor:
            taken = original(pool, nbytes)
            self.nbytes = max(self.nbytes, pool.nbytes)
            return taken

        monkeypatch.setattr(param_swapper, "lent_tensor", lend)


@pytest.mark.parametrize("overlap", long_but(["forward"], ["none", "forward", "auto"]))
@pytest.mark.parametrize("precision", long_but(["bf16-mixed"], ["32-true", "bf16-mixed", "bf16-true"]))
def test_same_bits_in_bounded_memory(
    precision: str, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model grows, the memory for its parameters does not; without a budget it holds them all."""
    recipe = dataclasses.replace(RECIPE, precision=precision)
    budget = BUDGET * (2 if precision == "32-true" else 1)
    most, held = Most(monkeypatch), {}
    for depth in (6, 12):
        of_depth = dataclasses.replace(recipe, depth=depth)
        straight = result(run_of(tmp_path / f"memory {depth}", budget=None, recipe=of_depth, overlap="none"))
        most.nbytes = 0
        run = run_of(tmp_path / f"budget {depth}", budget=budget, recipe=of_depth, overlap=overlap)
        assert_same(result(run), straight)
        held[depth] = most.nbytes
    assert 0 < held[6] <= budget and held[12] <= budget
    most.nbytes = 0
    nvme = {"zero": {**STORED, "offload_param": {"device": "nvme"}}}
    result(run_of(tmp_path / "unbounded", budget=None, recipe=recipe, overlap=overlap, **nvme))
    assert most.nbytes > budget


def test_two_processes(tmp_path: Path) -> None:
    """What is gathered counts, too, and the bits are those of parameters in memory."""
    runs = [
        dataclasses.replace(run_of(tmp_path / name, budget=budget), devices=2)
        for name, budget in (("memory", None), ("budget", 4 * BUDGET))
    ]
    straight, budget = launch(*runs)
    assert repr((budget.losses, budget.extra)) == repr((straight.losses, straight.extra))
    assert all(torch.equal(budget.masters[name], master) for name, master in straight.masters.items())


def test_evaluation_and_a_second_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget holds in validation and in a fit that resumes from a checkpoint."""
    most = Most(monkeypatch)
    run = run_of(tmp_path, budget=BUDGET, recipe=dataclasses.replace(RECIPE, validate=True, epoch_batches=2))
    module, trainer, _ = train(dataclasses.replace(run, save_after_fit=str(tmp_path / "a.ckpt")))
    assert module.validated
    trainer.strategy.close()  # type: ignore[attr-defined]
    longer = dataclasses.replace(
        run, recipe=dataclasses.replace(RECIPE, epoch_batches=2, max_steps=5), resume=str(tmp_path / "a.ckpt")
    )
    _, trainer, _ = train(longer)
    assert trainer.global_step == 5
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert most.nbytes <= BUDGET


class BuiltLater(LitTiny):
    """A module that is built for storage, layer by layer."""

    def __init__(self, recipe: Recipe) -> None:
        LightningModule.__init__(self)
        self.recipe, self.losses, self.validated = recipe, [], []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.recipe.build_model()


@pytest.mark.parametrize(
    ("module", "named"), [(LitTiny, "'model.tokens.weight'"), (BuiltLater, r"a parameter of shape \(")]
)
def test_a_parameter_that_does_not_fit(module: type[LitTiny], named: str, tmp_path: Path) -> None:
    """The error names it and what it needs, and nothing is left on storage."""
    strategy = SmartInfinityStrategy(tmp_path / "s", transfer={"parameter_bytes": 4096}, zero=STORED)
    with pytest.raises(ConfigError, match=rf"parameter_bytes=4096\) is too little .*{named} needs \d+ bytes"):
        quiet_trainer(tmp_path, strategy).fit(module(RECIPE))
    strategy.close()
    assert not [path for path in (tmp_path / "s").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("zero", "problem"),
    [
        ({"offload_param": {"device": "cpu"}}, "keeps all parameters in memory"),
        ({"offload_param": {"device": "nvme", "buffer_count": 3}}, "says by 'buffer_count'"),
        ({"offload_param": {"device": "nvme", "max_in_cpu": 10}}, "says by 'max_in_cpu'"),
        ({"stage3_prefetch_bucket_size": 10**6}, "lets more parameters be in memory"),
        ({"max_live_parameters": 10**6}, "lets more parameters be in memory"),
    ],
)
def test_settings_that_contradict_it(zero: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """They are refused before anything is written, by name and value."""
    with pytest.raises(ConfigError, match=problem):
        SmartInfinityStrategy(tmp_path / "s", transfer={"parameter_bytes": "1MB"}, zero=zero)
    assert not (tmp_path / "s").exists()


def test_settings_that_agree_with_it(tmp_path: Path) -> None:
    """What the user asks for within the budget stays."""
    zero = {"offload_param": {"device": "nvme"}, "stage3_prefetch_bucket_size": 1000}
    strategy = SmartInfinityStrategy(tmp_path / "s", transfer={"parameter_bytes": "1MB"}, zero=zero)
    section: Any = strategy.config["zero_optimization"]  # type: ignore[index]
    assert section["stage3_prefetch_bucket_size"] == 1000
    assert section["stage3_max_live_parameters"] == 10**6 // 8
