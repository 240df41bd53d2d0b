"""A storage failure during training raises a clear error and keeps what was there: the last step, the old save."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import platform
import re
import shutil
import signal
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_smartinfinity import SmartInfinityStrategy, StorageError, StorageFullError, TopK
from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.storage.folders import staging_folder
from lightning_smartinfinity.storage.folders.lock import FolderLock
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.zero3.checkpoints.formats import tensor_file
from tests.export.worker import after, kill
from tests.fabric.worker import quiet_fabric
from tests.helpers import native_testing as testing
from tests.helpers.assertions import assert_equal, refused
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.processes import run_module
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import fit, quiet_trainer
from tests.stock.situations import error_of
from tests.stock.systems import Hook
from tests.training.asynchronous_worker import TRANSFER, contents
from tests.training.rank_worker import CASES
from tests.training.worker import Recorder, Run, each_rank, train

RECIPE = Recipe(precision="bf16-mixed", max_steps=6)


def on_rank_one(fail: Callable[[Any], None], step: int = 2) -> Hook:
    """Return a callback that makes rank 1 fail once, by default in the third step."""

    def fail_there(trainer: Any) -> None:
        trainer.strategy.drain()  # the previous step may still be in flight
        if trainer.global_rank == 1:
            fail(trainer.strategy.optimizers[0])

    return Hook(step, fail_there)


def fail_write(optimizer: Any) -> None:
    """Make the next write of state fail."""
    testing.inject(optimizer.rank_state.handler._device._pipeline, fail_write_at=0)


def fail_commit(optimizer: Any) -> None:
    """Make the next write of the commit record fail."""
    real = os.pwrite

    def full(descriptor: int, *written: Any) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("commit.bin"):
            return real(descriptor, *written)
        os.pwrite = real
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite = full  # type: ignore[assignment]


def fail_read_of_activations(optimizer: Any) -> None:
    """Make the next read of activations fail."""
    testing.inject(optimizer.rank_state.activations._store.files.tensors.core, fail_read_at=0)


def fail_write_of_activations(optimizer: Any) -> None:
    """Make the next write of activations fail."""
    testing.inject(optimizer.rank_state.activations._store.files.tensors.core, fail_write_at=0, errno=errno.ENOSPC)


def fail_roll_back(optimizer: Any) -> None:
    """Make a rollback fail because the previous state is unreadable."""

    def unreadable() -> None:
        raise StorageError("rank-00001 cannot be read.", "Use another disk.")

    optimizer.rank_state.handler.roll_back = unreadable


def lose_gradient(optimizer: Any) -> None:
    """Make the next sums of squares fail because a copy from a device has failed."""
    optimizer.rank_state.arena.sum_of_squares = mock.Mock(side_effect=CudaError("A copy failed.", CudaError.REMEDY))


def damage_payload(optimizer: Any) -> None:
    """Corrupt the payload of the next step just before the step is committed."""
    state = optimizer.rank_state
    commit = state.handler._store.commit

    def damaging(**settings: Any) -> None:
        state.compressed._payloads.tensor[4] ^= 1  # flips a bit of the version in the first header
        commit(**settings)

    state.handler._store.commit = damaging


def fit_failing(
    root: Path, overlap: str, failure: Hook, clip: float | None = None, **options: Any
) -> tuple[pl.Trainer, str]:
    """Train and return the Trainer and the error of this rank."""
    zero = {"reduce_bucket_size": 4000}  # gradients leave during backward
    strategy = SmartInfinityStrategy(root / "storage", overlap=overlap, zero=zero, **options)
    trainer = quiet_trainer(root, strategy, devices=2, max_steps=5, gradient_clip_val=clip, callbacks=[failure])
    return trainer, error_of(lambda: trainer.fit(LitTiny(RECIPE)))


def close_in_flight(root: Path) -> bool:
    """Tell whether a step that fails on rank 1 while a Fabric loop closes leaves all parameters as before."""
    fabric = quiet_fabric(root / "closed", devices=2, precision="32-true", options={"overlap": "forward"})
    module, model, optimizer = Recipe().set_up(fabric)
    fabric.backward(model(Recipe().batch(0, fabric.global_rank, fabric.world_size)), model=model)
    before = _gathered(module)
    if fabric.global_rank == 1:
        fail_write(optimizer.engine.optimizer)
    optimizer.step()
    fabric.strategy.close()
    return all(map(torch.equal, before, _gathered(module)))


def _gathered(module: torch.nn.Module) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return [param.detach().clone() for param in module.parameters()]


def steps(root: Path, overlap: str, *activations: str) -> dict[str, Any]:
    """Run all fits, save what the last one leaves, and return the errors that this rank met.

    In the first fit a write of state fails, in the second one the write of the commit record; with activations a read
    and a write of these fail in two fits before. With ``none`` an earlier fit damages its compressed gradients in
    memory. With ``backward`` an earlier fit loses a gradient, and one cannot roll back a speculative update. With
    ``forward`` a loop in Fabric follows that ends with a step in flight.
    """
    seen: dict[str, Any] = {}
    if overlap == "none":
        failure = on_rank_one(damage_payload, step=1)
        _, seen["damage_payload"] = fit_failing(root, overlap, failure, compression=TopK(0.05))
    if overlap == "backward":
        _, seen["lose_gradient"] = fit_failing(root, overlap, on_rank_one(lose_gradient))
        # Clipping makes every speculative update wrong. After the third one speculation pauses.
        _, seen["fail_roll_back"] = fit_failing(root, overlap, on_rank_one(fail_roll_back, step=1), clip=1e-3)
    of_activations = (fail_read_of_activations, fail_write_of_activations) if activations else ()
    for fail in (*of_activations, fail_write, fail_commit):
        moved = EVERYTHING if fail in of_activations else None
        trainer, found = fit_failing(root, overlap, on_rank_one(fail), activations=moved)
        handler = trainer.strategy.optimizers[0].update.drained_handler()
        seen[fail.__name__] = {"met": found, "generation": handler.generation, "steps": max(handler.steps.tolist())}
    trainer.save_checkpoint(root / "rescued.ckpt")
    if overlap == "forward":
        seen["close_in_flight"] = close_in_flight(root)
    return seen


DEATHS: dict[str, tuple[object, str, int]] = {
    "writing": (tensor_file.TensorStream, "write", 4),
    "removing": (staging_folder, "_remove_tree", 0),  # the old save, after the swap
}


def die_in_save(moment: str) -> None:
    """Kill the last rank in the next save: at a call of the function in ``DEATHS``, after the number of calls there."""
    owner, name, count = DEATHS[moment]
    if dist.get_rank() == dist.get_world_size() - 1:
        setattr(owner, name, after(count, getattr(owner, name), kill))


def full_at(name: str) -> AbstractContextManager[object]:
    """Let a disk be full when the file of this name is written."""
    write = Path.write_text

    def refused(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **kwargs)

    return mock.patch.object(Path, "write_text", refused)


FAULTS: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "latest": lambda _: full_at("latest"),
    NOTE_NAME: lambda _: full_at(NOTE_NAME),
    "another process": lambda path: staging_folder.locked(path / ".saving", path),
}


def save_with_faults(trainer: Any, path: Path) -> dict[str, Any]:
    """Save with each fault on rank 0; return what this rank met, and whether the checkpoint is as it was."""
    before, seen = contents(path), dict[str, Any]()
    for name, fault in FAULTS.items():
        trainer.strategy.barrier()
        with fault(path) if trainer.global_rank == 0 else nullcontext():
            trainer.strategy.barrier()
            found = error_of(lambda: trainer.save_checkpoint(path))
            trainer.strategy.barrier()
        trainer.strategy.barrier()
        seen[name] = {"met": found, "same": contents(path) == before}
    trainer.strategy.barrier()
    trainer.save_checkpoint(path)
    return seen


def saves(folder: Path, *deaths: str) -> dict[str, Any]:
    """Save after the first step, copy that to ``first.ckpt``, and save over it; return what this rank met.

    The last rank may be killed at a moment of the save after the second step (see ``DEATHS``). Else the saves after the
    training fail on rank 0: the disk is full when the last files are written, or another process saves there.
    """
    path = folder / "last.ckpt"

    def save(trainer: Any) -> None:
        if trainer.global_step == 2:
            die_in_save(*deaths)
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            shutil.copytree(path, folder / "first.ckpt")

    strategy = SmartInfinityStrategy(folder / "storage", compression=TopK(0.05), transfer=TRANSFER)
    hooks = [Hook(step, save) for step in range(1, 2 + len(deaths))]
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    return save_with_faults(fit(LitTiny(RECIPE), folder, strategy, devices=devices, max_steps=4, callbacks=hooks), path)


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


def assert_ends_alike(resumed: LitTiny, recorder: Recorder, straight: Straight, *, after: int) -> None:
    """Assert that a training which goes on after some steps has the bits of the one to which nothing happens."""
    losses, masters = straight
    assert resumed.losses == losses[after:]
    assert_equal(recorder.masters, masters)


def test_after_a_failed_step_the_last_committed_one_can_be_saved_and_resumed(
    straight: Straight, tmp_path: Path
) -> None:
    """The parameters are rolled back, and a checkpoint saved then resumes as if the step had never been tried."""
    trainer = quiet_trainer(tmp_path, overlap="none", callbacks=[failing_write(3)], max_steps=RECIPE.max_steps)
    with refused(StorageFullError, match=r"state\.bin"):
        trainer.fit(LitTiny(RECIPE))
    assert trainer.strategy.optimizers[0].update.drained_handler().generation == 3
    trainer.save_checkpoint(tmp_path / "rescued.ckpt")
    resumed, _, b = train(Run(out=str(tmp_path / "b"), recipe=RECIPE, resume=str(tmp_path / "rescued.ckpt")))
    assert_ends_alike(resumed, b, straight, after=3)


def test_a_step_that_the_loop_has_counted_fails(straight: Straight, tmp_path: Path) -> None:
    """A checkpoint saved then says what it lacks, and resuming from storage repeats the step.

    The memory of gradients, which have a budget, does not outlive the training.
    """
    transfer = {"tasklet_bytes": 64 << 10, "gradient_bytes": 48 << 10}
    settings: dict[str, Any] = {"overlap": "forward", "max_steps": RECIPE.max_steps, "transfer": transfer}
    trainer = quiet_trainer(tmp_path, callbacks=[failing_write(2)], **settings)
    with pytest.raises(StorageError):
        trainer.fit(LitTiny(RECIPE))
    assert trainer.global_step == 3 and trainer.strategy.optimizers[0].update.drained_handler().generation == 2
    with pytest.warns(UserWarning, match="does not have the last step .* was rolled back .*resume from storage"):
        trainer.save_checkpoint(tmp_path / "rescued.ckpt")
    found = weakref.ref(trainer.strategy.optimizers[0].rank_state.arena._memory)
    trainer.strategy.close()  # type: ignore[attr-defined]
    del trainer
    gc.collect()
    assert found() is None
    options = {"overlap": "forward"}
    resumed, _, b = train(Run(str(tmp_path), RECIPE, resume="storage", transfer=transfer, options=options))
    assert_ends_alike(resumed, b, straight, after=2)


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
    seen = on_ranks(steps, tmp_path, overlap, *(["activations"] if activations else []))
    assert seen[0] == seen[1]
    if overlap == "none":
        assert "The part of the gradients that was not sent cannot be kept" in seen[0]["damage_payload"]
    if overlap == "forward":
        assert seen[0]["close_in_flight"], "a step was rolled back on one rank and not on the other"
    if overlap == "backward":
        assert seen[0]["lose_gradient"].startswith("CudaError: A copy failed. It comes from rank 1")
        assert (
            seen[0]["fail_roll_back"].startswith("StorageError: The optimizer state of this training is lost")
            and "rank-00001" in seen[0]["fail_roll_back"]
        )
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
        assert (
            f"rank 1 on {platform.node()}" in met["met"]
            and file in met["met"]
            and met["generation"] == met["steps"] == 2
        )
    assert len(list((tmp_path / "rescued.ckpt").rglob("*optim_states.pt"))) == 2


def test_a_save_that_fails_late_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """A disk that is full when the last files are written, or another process that saves, is told by both ranks.

    The checkpoint that was there is the same byte for byte, and the next save succeeds.
    """
    seen = on_ranks(saves, tmp_path)
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
@pytest.mark.parametrize(("ranks", "moment"), long_but([(2, "writing")], [(1, "removing"), (2, "writing")]))
def test_a_killed_save_leaves_a_whole_checkpoint(ranks: int, moment: str, tmp_path: Path, attack: Attack) -> None:
    """A kill of the last process during writing leaves the old checkpoint byte for byte.

    A kill after the swap leaves the new one, which resumes.
    """
    attack("kill within a save of a training of 1 or 2 processes", tries=1, outcome="the old or the new one is whole")
    done = run_module("tests.helpers.ranks", __name__, saves.__name__, tmp_path, moment, ranks=ranks)
    assert done.returncode == -signal.SIGKILL, (done.stdout + done.stderr)[-6000:]
    path, first = tmp_path / "last.ckpt", tmp_path / "first.ckpt"
    if ranks == 1:  # else the other process may live long enough to remove it; the status shows the kill in any case
        assert list(path.glob(".saving*")), "the kill did not come within a save"
    saved = {name: content for name, content in contents(path).items() if not name.startswith(".saving")}
    assert saved and (saved == contents(first, saved_to=path)) == (moment == "writing")
    if moment == "removing":
        run = partial(Run, recipe=RECIPE, transfer=TRANSFER, options={"compression": TopK(0.05)})
        straight, _, _ = train(run(out=str(tmp_path / "straight")))
        resumed, _, _ = train(run(out=str(tmp_path / "b"), resume=str(path), save_after_fit=str(path)))
        assert resumed.losses == straight.losses[2:]
        assert not list(path.glob(".saving*"))


# ---- bad input on one of two processes makes both raise and end by themselves, and leaves nothing behind


EXPECTED = {
    "file-in-the-way": ("StorageError", "rank-00001"),
    "locked": ("StorageLockedError", str(os.getpid())),
    "no-space-on-one": ("StorageFullError", "0.01 MiB are free"),
    "no-space-for-both": ("StorageFullError", "2.00 MiB are free"),
    "full-at-allocation": ("StorageFullError", "rank-00001"),
    "unsupported-optimizer": ("UnsupportedError", "NAdam"),
}


# The files of each case before, what each rank found, and the files after.
Attempted = tuple[dict[str, set[str]], list[dict[str, Any]], dict[str, set[str]]]


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def attempted(tmp_path_factory: pytest.TempPathFactory) -> Attempted:
    """Try every case in one pair of processes."""
    root = tmp_path_factory.mktemp("two")
    for case in CASES:
        (root / case / "storage").mkdir(parents=True)
    in_the_way = root / "file-in-the-way" / "storage" / "default" / "rank-00001"
    in_the_way.parent.mkdir()
    in_the_way.write_text("the user's")
    locked = root / "locked" / "storage" / "default" / "rank-00001"
    locked.mkdir(parents=True)
    lock = FolderLock(OpenFolder(locked))
    before = {case: _tree(root / case / "storage") for case in CASES}
    found = each_rank("bad_input", root)
    lock.release(remove=False)
    return before, found, {case: _tree(root / case / "storage") for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_our_own_error(case: str, attempted: Attempted) -> None:
    """Both ranks raise the same class, with value and remedy, and leave storage as before; then they train together."""
    before, found, after = attempted
    for outcome in (rank[case] for rank in found):
        if case == "nothing-wrong":
            assert outcome["error"] is None and len(outcome["losses"]) == 1
            continue
        error, named = EXPECTED[case]
        assert outcome["error"] == error, outcome
        assert named in outcome["message"] and outcome["remedy"].endswith(".")
        if case == "no-space-for-both":  # each rank's state alone would fit
            needed, free = map(float, re.findall(r"([\d.]+) MiB", outcome["message"]))
            assert needed / 2 < free < needed
            assert f"{case}/storage" in outcome["message"]
    assert after[case] == before[case]
