"""A training that was killed goes on from its last checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.processes import run_module
from tests.huggingface.test_trainer import same
from tests.huggingface.trained import train


def test_a_killed_training_resumes_to_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    """After a SIGKILL in the fifth step it goes on from the fourth, in the same output folder."""
    whole = train(model_folder, tmp_path / "whole", save_strategy="steps", save_steps=2)
    done = run_module("tests.huggingface.killed_worker", model_folder, tmp_path / "killed", "5")
    assert done.returncode != 0
    assert sorted(path.name for path in (tmp_path / "killed").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    resumed = train(model_folder, tmp_path / "killed", resume=True, save_strategy="steps", save_steps=2)
    assert resumed.losses == whole.losses[4:]
    assert same(resumed.weights, whole.weights)
