"""A resumed fit does what was due, and warns where it does not draw what the uninterrupted one drew.

:mod:`tests.training.test_storage_resume_loaders` resumes at all points.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.integrations.trainer import fit_record
from lightning_smartinfinity.integrations.trainer.fit_record import TrainerFitRecord
from tests.helpers.random_fit import LitRandom, SaveAt, StatefulLoader, seed
from tests.helpers.trainers import quiet_trainer


def fit(module: LitRandom, root: Path, *callbacks: Any, resume: Path | None = None, **options: Any) -> None:
    settings: dict[str, Any] = {"precision": "32-true", "max_epochs": 3, "callbacks": list(callbacks), **options}
    quiet_trainer(root, **settings).fit(module, ckpt_path=resume)


def test_a_due_validation_on_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, although random states are not restored."""
    fit(LitRandom(validate=True), tmp_path, SaveAt(tmp_path, "batch-0-4"), max_epochs=1)
    monkeypatch.setattr(fit_record, "fits", lambda *_, **__: False)
    again, resume = tmp_path / "again", tmp_path / "batch-0-4.ckpt"
    fit(LitRandom(validate=True), tmp_path, SaveAt(again, "validation-0-4"), resume=resume, max_epochs=1)
    assert (again / "validation-0-4.ckpt").exists()


def test_gradients_that_a_checkpoint_leaves_out_are_warned_of(tmp_path: Path) -> None:
    """Only between the batches of a step. The second step of an epoch has its fourth and last batch alone."""
    points = [f"batch-0-{number}" for number in range(1, 5)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(LitRandom(), tmp_path, SaveAt(tmp_path, *points, "epoch-0-4"), max_epochs=1, accumulate_grad_batches=3)
    told = [str(warning.message) for warning in caught if "holds no gradients" in str(warning.message)]
    assert ["those of batch 0 of epoch 0" in told[0], "those of batches 0 to 1 of epoch 0" in told[1]] == [True, True]
    assert len(told) == 2
    with pytest.warns(UserWarning, match="saved after 2 of the 3 batches of a step, and holds no gradients"):
        fit(LitRandom(), tmp_path, resume=tmp_path / "batch-0-2.ckpt", max_epochs=1, accumulate_grad_batches=3)


class SavingWithinBatch(LitRandom):
    """Saves a checkpoint within each batch, before its step and after it, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1, affine=False)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "step.ckpt"))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "step.ckpt"))


def test_a_batch_that_a_resumed_fit_repeats_is_warned_of(tmp_path: Path) -> None:
    """A fit repeats the batch within which its checkpoint was saved: with its step, or with its running statistics."""
    told = "within batch 1 of epoch 0, after its"
    with (
        pytest.warns(UserWarning, match=f"{told} optimizer step"),
        pytest.warns(UserWarning, match=f"{told} forward.*BatchNorm"),
    ):
        fit(SavingWithinBatch(), tmp_path, max_epochs=1, limit_train_batches=2)


def as_by_an_earlier_version(record: Any, patch: pytest.MonkeyPatch) -> None:
    """Make fits shuffle all batches, and checkpoints hold random states but no point of the fit."""
    patch.setattr(record, "keeps_order", lambda _: False)
    patch.setattr(record, "_point", lambda _, random: random)


@pytest.mark.parametrize("name", ["epoch-0-4", "batch-1-2"])
def test_checkpoints_of_earlier_versions(name: str, tmp_path: Path) -> None:
    """A fit goes on in their order, to the bit at an epoch's end. Within an epoch Lightning replays it. Both warn."""
    seed(1)
    straight, again = LitRandom(), LitRandom()
    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="begun by an earlier version"):
        as_by_an_earlier_version(TrainerFitRecord, patch)
        fit(straight, tmp_path, SaveAt(tmp_path, name))
    seed(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(again, tmp_path, resume=tmp_path / f"{name}.ckpt")
    told = " ".join(str(warning.message) for warning in caught)
    assert "begun by an earlier version" in told
    assert ("replays the epoch's batches" in told) == (name == "batch-1-2")
    if name == "epoch-0-4":
        assert again.losses == straight.losses[4:]


def test_random_numbers_of_workers_within_an_epoch_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stateful loader continues, but its workers draw from new seeds. A warning says so."""
    monkeypatch.setattr(StatefulLoader, "num_workers", 2, raising=False)
    fit(LitRandom(stateful=True), tmp_path, SaveAt(tmp_path, "batch-0-2"), max_epochs=1)
    with pytest.warns(UserWarning, match="workers"):
        fit(LitRandom(stateful=True), tmp_path, resume=tmp_path / "batch-0-2.ckpt", max_epochs=1)
