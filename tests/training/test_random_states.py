"""Checkpoints carry the random states of every rank. test_resume_points.py covers the point of saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.training.storage_worker import StorageRun, end_of, launch, steps_of

EPOCH = 3  # steps


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    """A fit of two processes that resumes at an epoch's end draws as one that never stopped."""

    def run(name: str, **settings: Any) -> Path:
        out = tmp_path / name
        fit = StorageRun(out=str(out), storage=str(out / "storage"), devices=2, **settings)
        code, output = launch(fit)
        assert code == 0 and "random states are not restored" not in output, output[-4000:]
        return out

    settings: dict[str, Any] = {"trainer": {"limit_val_batches": 0}}
    straight = run("straight", **settings)
    saved = run("first", epochs=1, save_every=EPOCH, **settings) / "last.ckpt"
    resumed = run("resumed", checkpoint=str(saved), **settings)
    for rank in range(2):
        expected = {step: line for step, line in steps_of(straight, rank).items() if step > EPOCH}
        assert steps_of(resumed, rank) == expected != {}
        assert end_of(resumed, rank) == end_of(straight, rank)
    assert steps_of(straight, 0) != steps_of(straight, 1)
