"""A resumed fit draws the same random numbers as an uninterrupted one, or warns that it does not.

Here Lightning's loops run under a strategy without DeepSpeed. test_random_states.py covers the whole flow.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_smartinfinity.resume import loops
from lightning_smartinfinity.resume import random_states as rng
from tests.helpers.random_fit import LitRandom, SaveAt, StatefulLoader, seed
from tests.helpers.trainers import quiet_trainer


class Remembering(SingleDeviceStrategy):
    """A strategy that treats random states as SmartInfinityStrategy does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.state: Any = None

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        checkpoint[rng.RNG_KEY] = rng.capture(self.root_device, world_size=1)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self.state = checkpoint.pop(rng.RNG_KEY)
        return checkpoint

    def on_train_start(self) -> None:
        loops.load_loader_states(self.lightning_module.trainer)
        if self.state is not None:
            rng.restore(self.state, self.root_device)
            loops.continue_epoch(self.lightning_module.trainer)


def fit(module: LitRandom, root: Path, *callbacks: Any, resume: Path | None = None, **options: Any) -> None:
    settings: dict[str, Any] = {"precision": "32-true", "max_epochs": 3, "callbacks": list(callbacks), **options}
    quiet_trainer(root, Remembering(), **settings).fit(module, ckpt_path=resume, weights_only=False)


def resumed_and_straight(
    folder: Path, saved: str, module: dict[str, Any], **options: Any
) -> tuple[list[Any], list[Any], list[str]]:
    """Return the losses of a resumed fit, the same losses of the uninterrupted fit, and the resume warnings."""
    seed(1)
    straight = LitRandom(**module)
    fit(straight, folder, SaveAt(folder, saved), **options)
    seed(2)
    again = LitRandom(**module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(again, folder, resume=folder / f"{saved}.ckpt", **options)
    messages = [str(w.message) for w in caught if "resum" in str(w.message).lower()]
    assert 0 < len(again.losses) < len(straight.losses)
    return again.losses, straight.losses[-len(again.losses) :], messages


EXACT = {
    "end of an epoch": ("epoch-0-4", {}, {}),
    "end of an epoch with validation": ("epoch-0-4", {"validate": True}, {}),
    "end of an epoch, counting steps": ("epoch-0-4", {"validate": True}, {"max_epochs": -1, "max_steps": 12}),
    "end of an epoch, hooks that draw": ("epoch-0-4", {"validate": True, "hooks": True}, {}),
    "end of an epoch, new loader in each": ("epoch-1-4", {}, {"reload_dataloaders_every_n_epochs": 1}),
    "validation at the end of an epoch": ("validation-0-4", {"validate": True, "hooks": True}, {}),
    "validation, counting steps": ("validation-0-4", {"validate": True}, {"max_epochs": -1, "max_steps": 12}),
    "an epoch's last batch": ("batch-0-4", {}, {}),
    "an epoch's last batch, counting steps": ("batch-0-4", {}, {"max_epochs": -1, "max_steps": 12}),
    "within an epoch, stateful": ("batch-1-2", {"stateful": True, "validate": True}, {}),
    "within an epoch, stateful, hooks that draw": ("batch-1-2", {"stateful": True, "hooks": True}, {}),
    "within an epoch, counting steps": ("batch-1-2", {"stateful": True}, {"max_epochs": -1, "max_steps": 12}),
    "within an epoch, loaders set up early": ("batch-1-2", {"stateful": True, "counts_steps": True}, {}),
    "end of an epoch, loaders set up early": ("epoch-0-4", {"stateful": True, "counts_steps": True}, {}),
    "an epoch's last batch, stateful": ("batch-0-4", {"stateful": True}, {}),
    "an epoch's last batch, stateful loaders set up early": ("batch-0-4", {"stateful": True, "counts_steps": True}, {}),
    "end of an epoch, plain loaders set up early": ("epoch-0-4", {"counts_steps": True}, {}),
    "validation within an epoch": ("validation-1-2", {"stateful": True, "validate": True}, {"val_check_interval": 0.5}),
}


@pytest.mark.parametrize("name", EXACT)
def test_resume_draws_what_the_uninterrupted_fit_drew(name: str, tmp_path: Path) -> None:
    """Batches, noise and dropout equal the uninterrupted fit's: losses are equal bit for bit, and nothing warns."""
    saved, module, options = EXACT[name]
    resumed, straight, messages = resumed_and_straight(tmp_path, saved, module, **options)
    assert [loss for *_, loss in resumed] == [loss for *_, loss in straight]
    assert not messages


WARNED = {
    "within an epoch, plain": ("batch-1-2", {}, {}, "replays the epoch's batches"),
    "within an epoch, plain, counting steps": ("batch-1-2", {}, {"max_epochs": -1, "max_steps": 12}, "replays"),
    "before the validation of an epoch": ("batch-0-4", {"validate": True}, {}, "leaves out the validation"),
    "before a validation within an epoch": (
        "batch-1-2",
        {"validate": True},
        {"val_check_interval": 0.5},
        "replays the epoch's batches .* and Lightning leaves out the validation",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_resume_that_cannot_be_exact_warns_once(name: str, tmp_path: Path) -> None:
    """One warning says what is not exact and what to do. Lightning adds no warning of its own."""
    saved, module, options, lost = WARNED[name]
    resumed, straight, messages = resumed_and_straight(tmp_path, saved, module, **options)
    assert [loss for *_, loss in resumed] != [loss for *_, loss in straight]
    assert len(messages) == 1
    assert re.search(lost, messages[0])
    assert "resume from a checkpoint of" in messages[0]


def test_random_numbers_of_workers_within_an_epoch_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stateful loader continues, but its workers draw from new seeds. A warning says so."""
    monkeypatch.setattr(StatefulLoader, "num_workers", 2, raising=False)
    *_, messages = resumed_and_straight(tmp_path, "batch-1-2", {"stateful": True})
    assert len(messages) == 1 and "workers" in messages[0]
    *_, messages = resumed_and_straight(tmp_path, "epoch-0-4", {"stateful": True})
    assert not messages


def test_states_of_another_number_of_processes_do_not_fit() -> None:
    """States of another number of processes are not used, and only the rank that may warn does."""
    state = rng.capture(torch.device("cpu"), world_size=2)
    assert rng.fits(state, world_size=2, warn=True)
    with pytest.warns(match="saved by 2 processes and is resumed by 3"):
        assert not rng.fits(state, world_size=3, warn=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not rng.fits(state, world_size=3, warn=False)
