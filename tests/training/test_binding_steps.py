"""What may come between a binding update's first gradient and its step: the training is that without overlap.

A binding update begins within backward and gives gradients up as it uses them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.step import Step
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny
from tests.helpers.processes import run_module
from tests.helpers.trainers import quiet_trainer
from tests.training.test_gradient_budget import BUDGET, PLAIN, run_of
from tests.training.test_overlap import assert_same, result
from tests.training.test_overlap_backward import InterruptAt
from tests.training.worker import launch

RECIPE = dataclasses.replace(PLAIN, depth=4, max_steps=8)
BINDING = {"overlap": "backward", "budget": 2 * BUDGET}


def test_a_gradient_of_another_rank_is_not_finite(tmp_path: Path) -> None:
    """Both ranks skip the step, though they have given gradients up, and go on with the bits of a run without overlap.

    Two more updates have to be kept before the next one is binding.
    """
    recipe = dataclasses.replace(RECIPE, nan_at=(4,), nan_rank=1)
    runs = [
        run_of(tmp_path / "straight", recipe, "none", devices=2),
        run_of(tmp_path / "binding", recipe, **BINDING, devices=2),
    ]
    straight, binding = launch(*runs, worker="tests.training.guesses_worker")
    counted = {name: binding.extra.pop(name) for name in ("adopted", "binding", "discarded")}
    assert counted == {"adopted": 7, "binding": 3, "discarded": 1}
    assert binding.extra["skipped"] == [4]
    expected = {name: straight.extra[name] for name in binding.extra}
    assert_same(
        (repr((binding.losses, binding.extra)), binding.masters), (repr((straight.losses, expected)), straight.masters)
    )


# ---- Ctrl-C

INTERRUPTED = {
    "the update begins": (TransferHandler, "begin_incremental"),
    "a tasklet is opened": (Step, "extend"),
    "a gradient has come": (Speculation, "arrived"),
    "the update is completed": (Step, "complete"),
    "the step adopts the update": (Speculation, "adopt"),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a training without overlap, budget and interrupt."""
    return result(run_of(tmp_path_factory.mktemp("straight"), RECIPE, "none"))


@pytest.mark.parametrize(
    ("name", "after"),
    long_but(
        [("a gradient has come", True), ("the step adopts the update", True)],
        itertools.product(INTERRUPTED, [False, True]),
    ),
)
def test_an_interrupt(name: str, after: bool, straight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is rolled back. What resumes from a checkpoint that is saved then has the bits of an unbroken run."""
    run = run_of(tmp_path / "interrupted", RECIPE, **BINDING)
    strategy = SmartInfinityStrategy(tmp_path / "storage", transfer=run.transfer, **run.options)
    interrupt = InterruptAt(monkeypatch, INTERRUPTED[name], after=after)
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[interrupt], max_steps=8, precision=RECIPE.precision)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(LitTiny(RECIPE))
    optimizer = strategy.optimizers[0]
    assert optimizer.speculation._binds and optimizer.update.drained_handler().generation == 2
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    strategy.close()
    resumed = dataclasses.replace(run, resume=str(tmp_path / "saved.ckpt"))
    (losses, _, extra), masters = result(resumed)
    (expected_losses, _, expected_extra), expected = straight
    assert losses == expected_losses[2:] and extra["steps"] == expected_extra["steps"]
    assert all(torch.equal(masters[name], expected[name]) for name in expected)


# That an error of one rank reaches all of them is in test_failures.py.
@pytest.mark.parametrize("ranks", long_but([1], [1, 2]))
def test_a_weight_that_is_used_once_more(ranks: int, tmp_path: Path) -> None:
    """All ranks raise an error that names it, and its state is that of the step before."""
    done = run_module("tests.training.used_again_worker", tmp_path, str(ranks), ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(ranks):
        outcome = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert "parameter 'model.blocks.3.block.norm1.weight' was used or changed after its update" in outcome["error"]
        assert outcome["binding"] == 2 and outcome["generation"] == 4
        assert outcome["differ"] == []
