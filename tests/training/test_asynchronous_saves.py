"""Checkpoints that are saved beside the training, also by ModelCheckpoint, are those that it waits for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_smartinfinity.errors import StorageFullError
from lightning_smartinfinity.storage.state.capacities import Capacities
from lightning_smartinfinity.storage.state.state_store import StateStore
from tests.helpers.long_cases import long_but
from tests.helpers.ranks import on_ranks
from tests.stock.systems import Hook
from tests.training.asynchronous_worker import (
    SAVE_AT,
    Turns,
    contents,
    save_on_two,
    save_twice,
    train,
)

NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
IN_BF16 = {"precision": "bf16-mixed"}
WITHOUT_EPS: dict[str, Any] = {"optimizer": "SGD", "eps": None}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_format": "bf16", "recipe": IN_BF16},
    "int8": {"state_format": "int8", "recipe": IN_BF16},
    "int8_remainder": {"state_format": "int8_remainder", "recipe": IN_BF16},
    "SGD with momentum": {"recipe": {**WITHOUT_EPS, "optimizer_kwargs": {"momentum": 0.9}}},
    "SGD": {"recipe": WITHOUT_EPS},
    "RMSprop": {"recipe": {"optimizer": "RMSprop", "optimizer_kwargs": {"centered": True}}},
    "forward": {"overlap": "forward"},
    "backward": {"overlap": "backward", "recipe": {"frozen": True}},
    "parameters on storage": {"zero": NVME, "recipe": IN_BF16},
    "parameters on storage, backward": {"zero": NVME, "overlap": "backward", "recipe": IN_BF16},
    "DRAM tier": {"transfer": {"dram_cache_bytes": 100_000, "durability": "power"}},
    "several folders": {"folders": 3, "overlap": "forward", "recipe": {"scheduler": "step", "groups": True}},
    "accumulation, clipping": {"recipe": {"accumulate": 2, "clip": 0.3}, "trainer": {"gradient_clip_val": 0.3}},
    "fp16, skipped steps": {"recipe": {"precision": "16-mixed", "nan_at": (1, SAVE_AT, SAVE_AT + 2)}},
    "validation": {"recipe": {"validate": True}, "trainer": {"val_check_interval": 2}, "overlap": "forward"},
    "page cache": {"transfer": {"io_engine": "plain"}},
    "weights only": {"weights_only": True, "state_format": "int8", "recipe": IN_BF16},
}
USUAL = ("fp16, skipped steps", "parameters on storage, backward", "weights only")


@pytest.mark.parametrize("name", long_but(USUAL, CASES))
def test_a_save_beside_training_equals_one_that_training_waits_for(name: str, tmp_path: Path) -> None:
    """With a step between any two windows, each file is the same to the byte, and so is the rest of the training."""
    settings, turns = dict(CASES[name]), Turns()
    save = save_twice(tmp_path, weights_only=settings.pop("weights_only", False))
    with turns.taken():
        losses = train(tmp_path, turns, save, **settings)
    assert turns.num_windows > 2 or name == "SGD", "training did not go on beside the save"
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")
    assert losses == train(tmp_path / "plain", **settings)
    assert contents(tmp_path / "end") == contents(tmp_path / "plain/end")


def test_a_save_of_two_processes_equals_one_that_they_wait_for(tmp_path: Path) -> None:
    """Both processes' files are the same to the byte."""
    assert min(on_ranks(save_on_two, tmp_path)) > 1
    assert len(contents(tmp_path / "beside")) > 4
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")


def write_from_outside(trainer: pl.Trainer) -> None:
    """Change a master and a moment."""
    weight: Any = trainer.lightning_module.model.blocks[0].up.weight
    master = safe_get_full_fp32_param(weight)
    safe_set_full_fp32_param(weight, 2 * master)
    safe_set_full_optimizer_state(weight, torch.ones_like(master), "exp_avg")


@pytest.mark.parametrize("overlap", long_but(["forward"], ["forward", "backward"]))
def test_what_happens_beside_a_save_changes_nothing_in_it(overlap: str, tmp_path: Path) -> None:
    """The files are those of a save that training waits for, and the training is as it is without one."""

    def actions(root: Path) -> list[pl.Callback]:
        write = Hook(SAVE_AT + 1, write_from_outside)
        return [write, Hook(SAVE_AT + 2, lambda trainer: trainer.strategy.load_checkpoint(root / "waited"))]

    turns, plain = Turns(), tmp_path / "plain"
    with turns.taken():
        losses = train(tmp_path, turns, save_twice(tmp_path), *actions(tmp_path), overlap=overlap)
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")
    assert losses == train(plain, save_twice(plain, beside=False), *actions(plain), overlap=overlap)
    assert contents(tmp_path / "end") == contents(plain / "end")


class Watch(pl.Callback):
    """Records before each batch which checkpoints exist, and whether a save is in progress; no link may dangle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[set[str]] = []
        self.threads: set[str] = set()

    def on_train_batch_start(self, *_: Any) -> None:
        assert all(path.exists() for path in self.folder.glob("*.ckpt") if path.is_symlink())
        self.seen.append({path.name for path in self.folder.glob("*.ckpt")})
        self.threads |= {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_saves_beside_training(save_last: Any, tmp_path: Path) -> None:
    """The best and the last checkpoint are saved in turn; one is removed only when the newer one is whole.

    A link to it waits until it is whole. Its settings, and with them the key of its state, may change meanwhile.
    """
    folder, turns = tmp_path / "c", Turns()
    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_last=save_last)
    watch, change = Watch(folder), Hook(4, lambda _: setattr(checkpoint, "mode", "max"))
    with turns.taken():
        train(
            tmp_path,
            watch,
            change,
            turns,
            checkpoint,
            trainer={"enable_checkpointing": True, "logger": CSVLogger(tmp_path)},
        )
    assert {path.name for path in folder.iterdir()} == {"step=9.ckpt", "last.ckpt"}
    assert all(names for names in watch.seen[7:]), "the old checkpoint went before the new one was whole"
    assert (watch.seen[3] == set()) == (save_last is True), "training waited for the first save, or a link did not"
    assert save_last == "link" or "smart-infinity-save" in watch.threads
    assert contents(folder / "step=9.ckpt").keys() == contents(folder / "last.ckpt").keys()
    assert "_save_checkpoint" not in vars(checkpoint)


def test_a_name_that_is_being_saved_is_taken(tmp_path: Path) -> None:
    """Checkpoints of one name get version numbers, as if each were whole before the next one is named."""
    folder = tmp_path / "c"
    checkpoint = ModelCheckpoint(dirpath=folder, filename="same", every_n_train_steps=3, save_top_k=-1, monitor="step")
    train(tmp_path, checkpoint, trainer={"enable_checkpointing": True})
    assert {path.name for path in folder.iterdir()} == {"same.ckpt", "same-v1.ckpt", "same-v2.ckpt"}


class LooksAtOnce(CSVLogger):
    """A logger that looks at a checkpoint as soon as it hears of it."""

    found: ClassVar[list[bool]] = []

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.found.append((Path(checkpoint_callback.best_model_path) / "checkpoint").is_dir())


class Room(pl.Callback):
    """Records the bytes of the state files when the fit begins, as a share of those with two places for each tasklet.

    Args:
        refused: How often storage has no room for more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refused: int = 0) -> None:
        self.asked, make_room = 0, Capacities.make_room

        def make(capacities: Capacities, places: Any) -> None:
            self.asked += 1
            if self.asked <= refused:
                raise StorageFullError("Nothing is free.", "Free space.")
            make_room(capacities, places)

        monkeypatch.setattr(Capacities, "make_room", make)
        self.share = 0.0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        extents = strategy._training_optimizer.rank_state.handler._layout.extents
        self.share = strategy.state_bytes / sum(extents.file_bytes(device) for device in range(extents.num_devices))


EACH: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": 3, "save_top_k": -1}


@pytest.mark.parametrize(
    ("options", "settings", "share"),
    [
        pytest.param(EACH, {"folders": 2}, 1.5, marks=pytest.mark.long),
        ({"save_top_k": 0, "save_last": True}, {}, 1.5),
        ({"save_top_k": 0}, {}, 1),
        pytest.param(EACH, {"trainer": {"fast_dev_run": True}}, 1, marks=pytest.mark.long),
    ],
    ids=["folders", "last alone", "saves nothing", "fast_dev_run"],
)
def test_room_is_made_before_the_fit(
    options: dict[str, Any], settings: dict[str, Any], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State files get a third place for each tasklet at set-up, if there will be saves beside the training."""
    room, checkpoint = Room(monkeypatch), ModelCheckpoint(dirpath=tmp_path / "c", **options)
    trainer = {"enable_checkpointing": True, **settings.get("trainer", {})}
    train(tmp_path, room, checkpoint, **{**settings, "trainer": trainer})
    assert room.share == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(
    ("transfer", "logger", "refused", "waits", "num_warnings"),
    [
        pytest.param({}, CSVLogger, 0, False, 0, marks=pytest.mark.long),
        ({}, LooksAtOnce, 0, True, 0),
        ({"asynchronous": False}, None, 0, True, 0),
        pytest.param({"durability": "none"}, None, 0, True, 0, marks=pytest.mark.long),
        ({}, None, 9, True, 1),
        ({}, None, 1, False, 1),
    ],
    ids=["Lightning's logger", "a logger that looks", "asked", "one place", "never room", "room at the first save"],
)
def test_whether_training_waits_for_checkpoints(
    transfer: dict[str, Any],
    logger: Any,
    refused: int,
    waits: bool,
    num_warnings: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """It waits where it is asked to, a logger of the user's may look, or storage has no room, of which it warns once.

    It always waits for ``trainer.save_checkpoint``. A checkpoint is noted on storage once it is in place.
    """

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        assert (tmp_path / "own.ckpt/checkpoint").is_dir()

    def note(store: StateStore, path: str, *, step: int) -> None:
        noted.add((step, Path(path, "checkpoint").is_dir()))

    found: list[bool] = []
    noted: set[tuple[int, bool]] = set()
    monkeypatch.setattr(LooksAtOnce, "found", found)
    monkeypatch.setattr(StateStore, "note_checkpoint", note)
    room, watch = Room(monkeypatch, refused=refused), Watch(tmp_path / "c")
    callbacks = [room, watch, Hook(SAVE_AT, save), ModelCheckpoint(dirpath=tmp_path / "c", **EACH)]
    trainer = {"enable_checkpointing": True, "logger": logger(tmp_path / "logs") if logger else False}
    train(tmp_path, *callbacks, trainer=trainer, transfer=transfer)
    assert room.share == pytest.approx(1 if waits or refused else 1.5, rel=0.02)
    assert ("smart-infinity-save" not in watch.threads) == waits
    assert found == [True] * 3 * (logger is LooksAtOnce)
    assert not waits or watch.seen[3] == {"step=3.ckpt"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step=3.ckpt", "step=6.ckpt", "step=9.ckpt"}
    told = [warning for warning in recwarn if "Training waits for checkpoints" in str(warning.message)]
    assert len(told) == num_warnings
    assert noted == {(step, True) for step in (SAVE_AT, 3, 6, 9)}
