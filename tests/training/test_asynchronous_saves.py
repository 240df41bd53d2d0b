"""Checkpoints that are saved beside the training: whole, equal to those that it waits for, and never torn."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity import native
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.errors import (
    CheckpointError,
    StorageCorruptError,
    StorageFullError,
    StorageTimeoutError,
)
from lightning_smartinfinity.store import in_time
from lightning_smartinfinity.store.capacities import Capacities
from lightning_smartinfinity.store.pin import Pin
from lightning_smartinfinity.zero3.checkpoints import background_saves, folder_swap
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.processes import run_module
from tests.store.test_hanging_calls import Disk
from tests.training.asynchronous_worker import (
    SAVE_AT,
    SaveTwice,
    Turns,
    contents,
    fail_on_last_rank,
    save_beside,
    train,
)
from tests.training.storage_worker import StorageRun, end_of, launch

NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_format": "bf16", "recipe": {"precision": "bf16-mixed"}},
    "int8": {"state_format": "int8", "recipe": {"precision": "bf16-mixed"}},
    "int8_remainder": {"state_format": "int8_remainder", "recipe": {"precision": "bf16-mixed"}},
    "SGD": {"recipe": {"optimizer": "SGD", "optimizer_kwargs": {"momentum": 0.9}, "eps": None}},
    "forward": {"overlap": "forward"},
    "backward": {"overlap": "backward", "recipe": {"frozen": True}},
    "parameters on storage": {"zero": NVME, "recipe": {"precision": "bf16-mixed"}},
    "DRAM tier": {"transfer": {"dram_cache_bytes": 100_000, "durability": "power"}},
}
USUAL = ("fp32", "int8", "backward", "parameters on storage", "DRAM tier")


@pytest.mark.parametrize("name", long_but(USUAL, CASES))
def test_a_save_beside_training_equals_one_that_training_waits_for(name: str, tmp_path: Path) -> None:
    """With a step between any two windows, each file is the same to the byte, and so is the rest of the training."""
    turns = Turns()
    with turns.taken():
        losses = train(tmp_path, turns, SaveTwice(tmp_path), **CASES[name])
    assert turns.num_windows > 2, "training did not go on beside the save"
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")
    assert losses == train(tmp_path / "plain", **CASES[name])
    assert contents(tmp_path / "end") == contents(tmp_path / "plain/end")


def test_a_save_of_two_processes_equals_one_that_they_wait_for(tmp_path: Path) -> None:
    """Both processes' files are the same to the byte."""
    done = run_module("tests.training.asynchronous_worker", tmp_path, "2", "equal", ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text())["num_windows"] > 1
    assert len(contents(tmp_path / "beside")) > 4
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")


def test_a_pinned_place_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pin is taken away, the save meets an extent of another generation, and says so."""
    monkeypatch.setattr(Pin, "__init__", unpinned(Pin.__init__))
    turns = Turns()
    with turns.taken(), pytest.raises(StorageCorruptError, match="generation"):
        train(tmp_path, turns, SaveTwice(tmp_path))


def unpinned(original: Any) -> Any:
    def construct(pin: Pin, record: Any) -> None:
        original(pin, record)
        pin.release_all()

    return construct


def test_a_failed_save_ends_the_fit_at_the_next_step(tmp_path: Path) -> None:
    """The error is that of a save that training waits for, and what the path held before is as it was."""
    saw = fail_on_last_rank(tmp_path, 1)
    assert saw["error"].startswith("CheckpointError: ") and "No space left" in saw["error"]
    assert saw["whole"] and saw["step"] < 9


def test_a_failed_save_ends_the_fit_of_all_processes(tmp_path: Path) -> None:
    """If the disk of one process is full, both raise, at the same step."""
    done = run_module("tests.training.asynchronous_worker", tmp_path, "2", "full", ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    saw = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert all("No space left" in each["error"] and each["whole"] for each in saw)
    assert saw[0]["step"] == saw[1]["step"]


def test_a_failure_near_the_end_is_raised_by_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails after the last step makes the fit fail."""

    def refused(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder_swap, "_put_in_place", refused)
    turns = Turns()

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == SAVE_AT:
                save_beside(trainer, tmp_path / "c.ckpt")

    with turns.taken(), pytest.raises(CheckpointError, match="could not be put in place"):
        train(tmp_path, turns, Save())
    assert not (tmp_path / "c.ckpt").exists()


class Watch(pl.Callback):
    """Records after each step which checkpoints exist, and whether a save is in progress."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[set[str]] = []
        self.threads: set[str] = set()

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append({path.name for path in self.folder.glob("*.ckpt")})
        self.threads |= {thread.name for thread in threading.enumerate()}


def test_model_checkpoint_saves_beside_training(tmp_path: Path) -> None:
    """The best and the last checkpoint are saved in turn; one is removed only when the newer one is whole."""
    folder, turns = tmp_path / "c", Turns()
    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_last=True)
    watch = Watch(folder)
    with turns.taken():
        train(tmp_path, watch, turns, checkpoint, trainer={"enable_checkpointing": True})
    assert {path.name for path in folder.iterdir()} == {"step=9.ckpt", "last.ckpt"}
    assert all(names for names in watch.seen[7:]), "the old checkpoint went before the new one was whole"
    assert watch.seen[3] == set(), "training waited for the first save"
    assert "smart-infinity-save" in watch.threads
    assert contents(folder / "step=9.ckpt").keys() == contents(folder / "last.ckpt").keys()
    assert "_save_checkpoint" not in vars(checkpoint)


def test_a_name_that_is_being_saved_is_taken(tmp_path: Path) -> None:
    """Checkpoints of one name get version numbers, as if each were whole before the next one is named."""
    folder = tmp_path / "c"
    checkpoint = ModelCheckpoint(dirpath=folder, filename="same", every_n_train_steps=3, save_top_k=-1, monitor="step")
    train(tmp_path, checkpoint, trainer={"enable_checkpointing": True})
    assert {path.name for path in folder.iterdir()} == {"same.ckpt", "same-v1.ckpt", "same-v2.ckpt"}


def test_a_link_to_the_last_checkpoint_never_dangles(tmp_path: Path) -> None:
    """``save_last="link"`` waits until the checkpoint is whole."""
    folder = tmp_path / "c"

    class Look(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            link = folder / "last.ckpt"
            assert link.exists() or not link.is_symlink()

    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=4, save_last="link")
    train(tmp_path, Look(), checkpoint, trainer={"enable_checkpointing": True})
    assert (folder / "last.ckpt").resolve().name == "step=8.ckpt"


def test_own_saves_and_asynchronous_false_wait(tmp_path: Path) -> None:
    """``trainer.save_checkpoint`` returns when the checkpoint is whole; with the setting every save does."""
    folder = tmp_path / "c"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == SAVE_AT:
                trainer.save_checkpoint(tmp_path / "own.ckpt")
                assert (tmp_path / "own.ckpt/checkpoint").is_dir()

    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3)
    watch = Watch(folder)
    train(tmp_path, watch, Save(), checkpoint, trainer={"enable_checkpointing": True}, transfer={"asynchronous": False})
    assert watch.seen[3] == {"step=3.ckpt"}
    assert "smart-infinity-save" not in watch.threads


@pytest.mark.parametrize("durability", ["none", "step"])
def test_without_room_training_waits(
    durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Where storage has no room for third places there is one warning; with ``durability="none"`` there is none."""

    def refuse(*_: Any) -> None:
        raise StorageFullError("Nothing is free.", "Free space.")

    monkeypatch.setattr(Capacities, "make_room", refuse)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    watch = Watch(tmp_path / "c")
    train(tmp_path, watch, checkpoint, trainer={"enable_checkpointing": True}, transfer={"durability": durability})
    assert watch.seen[3] == {"step=3.ckpt"}
    waits = [warning for warning in recwarn if "Training waits for checkpoints" in str(warning.message)]
    assert len(waits) == (durability == "step")


@pytest.mark.parametrize(("devices", "num_kills"), long_but([(1, 3)], [(1, 3), (1, 30), (2, 10)]))
def test_kills_beside_saves(devices: int, num_kills: int, tmp_path: Path, attack: Attack) -> None:
    """After each kill the checkpoint is whole, and the training resumes from storage to the same bits."""
    attack(
        "kill while a checkpoint is saved beside training", tries=num_kills, outcome="checkpoint and store are whole"
    )

    def run(name: str, **settings: Any) -> StorageRun:
        transfer, module = {"keep": "on-failure"}, {"width": 128}
        storage = str(tmp_path / name / "storage")
        return StorageRun(
            out=str(tmp_path / name),
            storage=storage,
            devices=devices,
            save_every=1,
            transfer=transfer,
            module=module,
            **settings,
        )

    code, output = launch(run("straight"))
    assert code == 0, output[-4000:]
    draw = random.Random(num_kills)
    for kill in range(num_kills):
        step, after = 3 + kill % 5, draw.uniform(0.001, 0.1)
        code, output = launch(
            run(f"{kill}", kill_at="kill at save", kill_step=step, kill_after=after, kill_rank=devices - 1)
        )
        assert code in (0, -signal.SIGKILL), output[-4000:]
        checkpoint = tmp_path / f"{kill}/last.ckpt"
        assert main(["scrub", str(checkpoint), "--quiet"]) == 0
        if code != 0:
            code, output = launch(run(f"{kill}", resume=True))
            assert code == 0, output[-4000:]
        assert end_of(tmp_path / f"{kill}")["state"] == end_of(tmp_path / "straight")["state"]


@pytest.mark.parametrize("error", [RuntimeError("an error of the user's"), KeyboardInterrupt()])
def test_what_ends_a_fit_lets_its_save_end(error: BaseException, tmp_path: Path) -> None:
    """After an error or Ctrl-C the checkpoint that was being saved is whole."""
    turns = Turns()

    class Fail(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == SAVE_AT + 1:
                assert not (tmp_path / "beside").exists()
                raise error

    with turns.taken(), pytest.raises((RuntimeError, SystemExit)):
        train(tmp_path, turns, SaveTwice(tmp_path), Fail())
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Disk]:
    native.take_back_ask_to_end()  # which an earlier test's interrupt has left
    disk = Disk(monkeypatch, tmp_path / "stat")
    yield disk
    disk.answer()


def test_a_disk_that_does_not_answer(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is given up, the fit ends with the error of one that it waits for, and the old checkpoint is whole."""
    monkeypatch.setattr(background_saves, "io_limit", lambda _: in_time.io_limit(0.3))
    disk.works_until_it_hangs()
    path, turns, before = tmp_path / "c.ckpt", Turns(), dict[str, bytes]()

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(path)
                before.update(contents(path))
            if trainer.global_step == SAVE_AT:
                save_beside(trainer, path)
                disk.hang(os, "pwrite")

    with turns.taken(), pytest.raises(StorageTimeoutError, match=r"Writing '.*optim_states.pt' did not return"):
        train(tmp_path, turns, Save())
    assert disk.hung
    assert {name: content for name, content in contents(path).items() if ".saving" not in name} == before
