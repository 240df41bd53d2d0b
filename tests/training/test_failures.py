"""A storage failure during training raises a clear error and keeps the parameters of the last committed step."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import platform
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_smartinfinity import (
    StorageCorruptError,
    StorageError,
    StorageFullError,
)
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientWindows
from tests.helpers import native_testing as testing
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import run_module
from tests.helpers.trainers import quiet_trainer
from tests.training.worker import Run, train

RECIPE = Recipe(precision="bf16-mixed", max_steps=6)


class Disturb(pl.Callback):
    """A callback that calls a function with the optimizer before a given step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step = step
        self.action = action

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.action(trainer.strategy.optimizers[0])


def fail_io(**faults: Any) -> Any:
    """Return an action that makes the device's next transfers fail."""
    return lambda optimizer: testing.inject(optimizer.update.drained_handler()._device._pipeline, **faults)


def flip_a_byte(optimizer: Any) -> None:
    """Damage both places of every tasklet on storage, once no update is under way that would write them again."""
    optimizer.update.drained_handler()
    (state,) = Path(optimizer._offload.storage[0]).rglob("state.bin")
    with state.open("r+b") as file:
        for offset in range(64, state.stat().st_size, 4096):
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))


FAULTS: dict[str, tuple[Any, type[StorageError], str]] = {
    "a read fails": (fail_io(fail_read_at=0), StorageError, "state.bin"),
    "a write fails": (fail_io(fail_write_at=0), StorageError, "state.bin"),
    "the disk is full": (fail_io(fail_write_at=0, errno=errno.ENOSPC), StorageFullError, "state.bin"),
    "a byte flipped": (flip_a_byte, StorageCorruptError, "state.bin"),
}


Straight = tuple[list[float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Return losses and masters of a training to which nothing happens."""
    module, trainer, recorder = train(Run(out=str(tmp_path_factory.mktemp("straight")), recipe=RECIPE))
    trainer.strategy.close()  # type: ignore[attr-defined]
    return module.losses, recorder.masters


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_step_raises_with_path_and_remedy(name: str, tmp_path: Path) -> None:
    """The error has the class of the fault, names the file, and has a remedy."""
    action, expected, named = FAULTS[name]
    trainer = quiet_trainer(tmp_path, callbacks=[Disturb(3, action)], max_steps=RECIPE.max_steps)
    with pytest.raises(expected) as caught:
        trainer.fit(LitTiny(RECIPE))
    assert named in str(caught.value)
    assert caught.value.remedy.endswith(".")


def test_after_a_failed_step_the_last_committed_one_can_be_saved_and_resumed(
    straight: Straight, tmp_path: Path
) -> None:
    """The parameters are rolled back, and a checkpoint saved then resumes as if the step had never been tried."""
    losses, masters = straight
    disturb = Disturb(3, fail_io(fail_write_at=0))
    trainer = quiet_trainer(tmp_path, overlap="none", callbacks=[disturb], max_steps=RECIPE.max_steps)
    with pytest.raises(StorageError):
        trainer.fit(LitTiny(RECIPE))
    assert trainer.strategy.optimizers[0].update.drained_handler().generation == 3
    trainer.save_checkpoint(tmp_path / "rescued.ckpt")
    resumed, _, b = train(Run(out=str(tmp_path / "b"), recipe=RECIPE, resume=str(tmp_path / "rescued.ckpt")))
    assert resumed.losses == losses[3:]
    assert all(torch.equal(masters[name], b.masters[name]) for name in masters)


def test_a_step_that_the_loop_has_counted_fails(straight: Straight, tmp_path: Path) -> None:
    """A checkpoint saved then says what it lacks, and resuming from storage repeats the step."""
    losses, masters = straight
    settings: dict[str, Any] = {"overlap": "forward", "max_steps": RECIPE.max_steps}
    trainer = quiet_trainer(tmp_path, callbacks=[Disturb(2, fail_io(fail_write_at=0))], **settings)
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
    """Neither it nor the descriptors of its store outlive a training whose update failed when the loop had gone on."""
    transfer = {"tasklet_bytes": 64 * 1024, "gradient_bytes": 48 << 10}
    failing = Disturb(2, fail_io(fail_write_at=0))
    trainer = quiet_trainer(tmp_path, callbacks=[failing], transfer=transfer, overlap="forward", max_steps=6)
    try:
        trainer.fit(LitTiny(RECIPE))
    except StorageError:
        found = weakref.ref(trainer.strategy.optimizers[0].rank_state.arena._memory)
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert isinstance(found(), GradientWindows)
    del trainer, failing
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
    options = ["--activations"] if activations else []
    done = run_module("tests.training.failing_rank_worker", tmp_path, overlap, *options, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    if overlap == "none":
        assert "The part of the gradients that was not sent cannot be kept" in seen[0]["damage_payload"]
    if overlap == "backward":
        assert seen[0]["fail_roll_back"].startswith("StorageError: The optimizer state of this training is lost")
        assert "rank-00001" in seen[0]["fail_roll_back"]
    if overlap == "forward":
        assert seen[0]["close_in_flight"], "a step was rolled back on one rank and not on the other"
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
    done = run_module("tests.training.failed_save_worker", tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    for case, outcome in seen[0].items():
        assert outcome["same"], case
        if case == "another process":
            assert outcome["met"].startswith(f"StorageLockedError: Another process is writing to {tmp_path}/a.ckpt now")
        else:
            assert outcome["met"].startswith("CheckpointError: The checkpoint"), outcome
            assert case in outcome["met"] and "No space left" in outcome["met"], outcome
    assert not (tmp_path / "a.ckpt" / ".saving").exists()


@pytest.mark.parametrize("seed", long_but([0], range(4)))
def test_delayed_transfers_change_nothing(seed: int, straight: Straight, tmp_path: Path) -> None:
    """Random delays in every transfer, with a ring of two small tasklets, change no loss."""
    module = LitTiny(RECIPE)
    delays = Disturb(0, fail_io(seed=seed, max_delay_us=2000, short_transfer_every=3))
    quiet_trainer(
        tmp_path,
        callbacks=[delays],
        max_steps=RECIPE.max_steps,
        transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 2},
    ).fit(module)
    assert module.losses == straight[0]
