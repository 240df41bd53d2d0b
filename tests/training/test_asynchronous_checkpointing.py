"""ModelCheckpoint saves beside the training: its names, links and removals, its room, and when it waits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_smartinfinity.errors import StorageFullError
from lightning_smartinfinity.storage.state.capacities import Capacities
from tests.training.asynchronous_worker import SAVE_AT, Turns, contents, train


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


class LooksAtOnce(CSVLogger):
    """A logger that looks at a checkpoint as soon as it hears of it."""

    found: list[bool] | None = None

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.found = [*(self.found or []), (Path(checkpoint_callback.best_model_path) / "checkpoint").is_dir()]


@pytest.mark.parametrize("kind", [CSVLogger, LooksAtOnce])
def test_a_logger_that_looks_at_checkpoints(kind: type[CSVLogger], tmp_path: Path) -> None:
    """If a logger of the user's may look at checkpoints, saves wait until these are whole. Lightning's own do not."""
    logger, watch = kind(tmp_path / "logs"), Watch(tmp_path / "c")
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    train(tmp_path, watch, checkpoint, trainer={"enable_checkpointing": True, "logger": logger})
    assert ("smart-infinity-save" in watch.threads) == (kind is CSVLogger)
    if isinstance(logger, LooksAtOnce):
        assert logger.found == [True, True, True]


class Room(pl.Callback):
    """Records the bytes of the state files when the fit begins, as a share of those with two places for each tasklet.

    Args:
        refused: How often storage has no room for more.
        short: Whether the fit ends after a step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refused: float = 0, short: bool = False) -> None:
        self.short = short
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
        handler = strategy._training_optimizer.rank_state.handler
        extents = handler._layout.extents
        first = sum(extents.file_bytes(device) for device in range(extents.num_devices))
        self.share = strategy.state_bytes / first
        if self.short:
            trainer.fit_loop.epoch_loop.max_steps = 1


SAVING: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": 3, "save_top_k": -1}


@pytest.mark.parametrize(
    ("options", "settings", "share"),
    [
        (SAVING, {}, 1.5),
        pytest.param(SAVING, {"folders": 2}, 1.5, marks=pytest.mark.long),
        ({"save_top_k": 0, "save_last": True}, {}, 1.5),
        ({"save_top_k": 0}, {}, 1),
        pytest.param(SAVING, {"transfer": {"asynchronous": False}}, 1, marks=pytest.mark.long),
        (SAVING, {"transfer": {"durability": "none"}}, 1),
        pytest.param(SAVING, {"trainer": {"fast_dev_run": True}}, 1, marks=pytest.mark.long),
    ],
    ids=["saves", "folders", "last alone", "saves nothing", "waits", "one place", "fast_dev_run"],
)
def test_room_is_made_before_the_fit(
    options: dict[str, Any], settings: dict[str, Any], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State files get a third place for each tasklet at set-up, if there will be saves beside the training."""
    room, checkpoint = Room(monkeypatch, short=True), ModelCheckpoint(dirpath=tmp_path / "c", **options)
    trainer = {"enable_checkpointing": True, **settings.get("trainer", {})}
    train(tmp_path, room, checkpoint, **{**settings, "trainer": trainer})
    assert room.share == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(
    ("durability", "refused", "num_warnings", "waits"),
    [pytest.param("none", 9, 0, True, marks=pytest.mark.long), ("step", 9, 1, True), ("step", 1, 1, False)],
    ids=["one place", "never room", "room at the first save"],
)
def test_without_room_training_waits(
    durability: str,
    refused: int,
    num_warnings: int,
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Where storage has no room for third places there is one warning, at set-up; ``durability="none"`` gives none."""
    room, watch = Room(monkeypatch, refused=refused), Watch(tmp_path / "c")
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "c", **SAVING)
    transfer, trainer = {"durability": durability}, {"enable_checkpointing": True}
    train(tmp_path, room, watch, checkpoint, trainer=trainer, transfer=transfer)
    assert room.share == 1
    assert ("smart-infinity-save" not in watch.threads) == waits
    assert not waits or watch.seen[3] == {"step=3.ckpt"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step=3.ckpt", "step=6.ckpt", "step=9.ckpt"}
    told = [warning for warning in recwarn if "Training waits for checkpoints" in str(warning.message)]
    assert len(told) == num_warnings
