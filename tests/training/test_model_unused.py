"""Steps that do not use a parameter leave it unchanged, as torch does if its grad is None."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.helpers.long_cases import long_but
from tests.training.model_cases import UNUSED
from tests.training.model_runs import assert_trains_like_torch, train_near_storage, trainer_for

# Two processes train the others in turn, or another case has the same in another precision.
LONG = ("in bf16", "by one micro-batch", "by another module")


@pytest.mark.parametrize("name", long_but([name for name in UNUSED if name not in LONG], UNUSED))
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
