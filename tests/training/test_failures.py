"""A storage failure during training raises a clear error and keeps what was there: the last step, the old save."""

from __future__ import annotations

import errno
import gc
import itertools
import platform
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import (
    StorageError,
    StorageFullError,
)
from tests.helpers import native_testing as testing
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer
from tests.stock.systems import Hook
from tests.training import failing_rank_worker as failing
from tests.training.asynchronous_worker import contents
from tests.training.worker import Run, train

RECIPE = Recipe(precision="bf16-mixed", max_steps=6)


def failing_write(step: int) -> Hook:
    """Let a disk be full at the first write of state after a step."""

    def fail(trainer: Any) -> None:
        pipeline = trainer.strategy.optimizers[0].update.drained_handler()._device._pipeline
        testing.inject(pipeline, fail_write_at=0, errno=errno.ENOSPC)

    return Hook(step, fail)


Straight = tuple[list[float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Return losses and masters of a training to which nothing happens."""
    module, trainer, recorder = train(Run(out=str(tmp_path_factory.mktemp("straight")), recipe=RECIPE))
    trainer.strategy.close()  # type: ignore[attr-defined]
    return module.losses, recorder.masters


def test_after_a_failed_step_the_last_committed_one_can_be_saved_and_resumed(
    straight: Straight, tmp_path: Path
) -> None:
    """The parameters are rolled back, and a checkpoint saved then resumes as if the step had never been tried."""
    losses, masters = straight
    trainer = quiet_trainer(tmp_path, overlap="none", callbacks=[failing_write(3)], max_steps=RECIPE.max_steps)
    with pytest.raises(StorageFullError, match=r"state\.bin") as caught:
        trainer.fit(LitTiny(RECIPE))
    assert caught.value.remedy.endswith(".")
    assert trainer.strategy.optimizers[0].update.drained_handler().generation == 3
    trainer.save_checkpoint(tmp_path / "rescued.ckpt")
    resumed, _, b = train(Run(out=str(tmp_path / "b"), recipe=RECIPE, resume=str(tmp_path / "rescued.ckpt")))
    assert resumed.losses == losses[3:]
    assert all(torch.equal(masters[name], b.masters[name]) for name in masters)


def test_a_step_that_the_loop_has_counted_fails(straight: Straight, tmp_path: Path) -> None:
    """A checkpoint saved then says what it lacks, and resuming from storage repeats the step."""
    losses, masters = straight
    settings: dict[str, Any] = {"overlap": "forward", "max_steps": RECIPE.max_steps}
    trainer = quiet_trainer(tmp_path, callbacks=[failing_write(2)], **settings)
    with pytest.raises(StorageError):
        trainer.fit(LitTiny(RECIPE))
    assert trainer.global_step == 3
    assert trainer.strategy.optimizers[0].update.drained_handler().generation == 2
    with pytest.warns(UserWarning, match="does not have the last step .* was rolled back .*resume from storage"):
        trainer.save_checkpoint(tmp_path / "rescued.ckpt")
    trainer.strategy.close()  # type: ignore[attr-defined]
    resumed, _, b = train(Run(out=str(tmp_path), recipe=RECIPE, resume="storage", options={"overlap": "forward"}))
    assert resumed.losses == losses[2:]
    assert all(torch.equal(masters[name], b.masters[name]) for name in masters)


def test_the_memory_of_gradients_is_freed_after_a_failed_step(tmp_path: Path) -> None:
    """It does not outlive a training with a budget whose update failed when the loop had gone on."""
    settings: dict[str, Any] = {"transfer": {"tasklet_bytes": 64 << 10, "gradient_bytes": 48 << 10}, "max_steps": 6}
    trainer = quiet_trainer(tmp_path, callbacks=[failing_write(2)], overlap="forward", **settings)
    with suppress(StorageError):
        trainer.fit(LitTiny(RECIPE))
    found = weakref.ref(trainer.strategy.optimizers[0].rank_state.arena._memory)
    trainer.strategy.close()  # type: ignore[attr-defined]
    del trainer
    gc.collect()
    assert found() is None


@pytest.mark.parametrize(
    ("overlap", "activations"),
    long_but(
        [("none", False), ("forward", True), ("backward", False)],
        itertools.product(["none", "forward", "backward"], [False, True]),
    ),
)
def test_a_step_that_fails_on_one_rank_fails_on_all_and_none_commits_it(
    overlap: str, activations: bool, tmp_path: Path
) -> None:
    """Rank 0, whose storage works, raises rank 1's error and stays at the generation that both have.

    This also holds if rank 0 has committed when the commit of rank 1 fails, and the remaining state can be saved. If
    rank 1 cannot roll back a speculative update, or cannot keep what compression left out, its state is lost and both
    ranks raise.
    """
    seen = on_ranks(failing.steps, tmp_path, overlap, *(["activations"] if activations else []))
    assert seen[0] == seen[1]
    if overlap == "none":
        assert "The part of the gradients that was not sent cannot be kept" in seen[0]["damage_payload"]
    if overlap == "forward":
        assert seen[0]["close_in_flight"], "a step was rolled back on one rank and not on the other"
    if overlap == "backward":
        assert seen[0]["fail_roll_back"].startswith("StorageError: The optimizer state of this training is lost")
        assert "rank-00001" in seen[0]["fail_roll_back"]
    faults = [("fail_write", "StorageError", "state.bin"), ("fail_commit", "StorageFullError", "commit.bin")]
    if activations:
        faults += [
            ("fail_read_of_activations", "StorageError", "what forward saved"),
            ("fail_write_of_activations", "StorageFullError", "what forward saved"),
        ]
    for fault, kind, file in faults:
        met = seen[0][fault]
        assert met["met"].startswith(f"{kind}: ")
        assert "rank-00001" in met["met"] or "activations" in fault  # whose file has no name
        assert f"rank 1 on {platform.node()}" in met["met"]
        assert file in met["met"]
        assert met["generation"] == met["steps"] == 2
    assert len(list((tmp_path / "rescued.ckpt").rglob("*optim_states.pt"))) == 2


def test_a_save_that_fails_late_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """A disk that is full when the last files are written, or another process that saves, is told by both ranks.

    The checkpoint that was there is the same byte for byte, and the next save succeeds.
    """
    seen = on_ranks(failing.saves, tmp_path)
    assert seen[0] == seen[1]
    for case, outcome in seen[0].items():
        assert outcome["same"], case
        if case == "another process":
            assert outcome["met"].startswith(
                f"StorageLockedError: Another process is writing to {tmp_path}/last.ckpt now"
            )
        else:
            assert outcome["met"].startswith("CheckpointError: The checkpoint"), outcome
            assert case in outcome["met"] and "No space left" in outcome["met"], outcome
    assert not (tmp_path / "last.ckpt" / ".saving").exists()


@pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain")
def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path, attack: Attack) -> None:
    """A kill of one of two processes during writing leaves the old checkpoint byte for byte."""
    attack("kill within a save of a training of two processes", tries=1, outcome="the old one is whole")
    with pytest.raises(AssertionError) as killed:
        on_ranks(failing.saves, tmp_path, "die")
    path, first = tmp_path / "last.ckpt", tmp_path / "first.ckpt"
    saved = {name: content for name, content in contents(path).items() if not name.startswith(".saving")}
    assert saved == contents(first, saved_to=path) != {}, killed.value
