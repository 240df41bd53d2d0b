"""Parameters that some steps do not use are left alone in those, as torch leaves parameters whose grad is None."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.training.model_cases import CASES, UNUSED
from tests.training.model_runs import assert_trains_like_torch, train_near_storage, trainer_for


@pytest.mark.parametrize("name", UNUSED)
def test_parameters_unused_for_some_steps_train_like_torch(name: str, tmp_path: Path) -> None:
    """No decay, no moment, no count in a step without gradient: alternately used, used late, by one micro-batch, never.

    Stock DeepSpeed updates them with their last gradient again, and decays them.
    """
    assert_trains_like_torch(UNUSED[name], train_near_storage(UNUSED[name], tmp_path))


@pytest.mark.parametrize("name", ["by one micro-batch in bf16", "a thousand tiny tensors"])
def test_resuming_keeps_every_count(name: str, tmp_path: Path) -> None:
    """Stopped after three steps, a run goes on with the masters and counts of one that never stopped, to the bit."""
    case = CASES[name]
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
