"""Checkpoints that are saved beside the training, also by ModelCheckpoint, are those that it waits for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_smartinfinity.devices.base import Traffic
from lightning_smartinfinity.errors import StorageFullError
from lightning_smartinfinity.storage.state.capacities import Capacities
from tests.helpers.long_cases import long_but
from tests.helpers.ranks import on_ranks
from tests.stock.systems import Hook
from tests.training.asynchronous_worker import (
    SAVE_AT,
    Progress,
    Turns,
    contents,
    one_name,
    save_beside,
    save_on_two,
    save_twice,
    saves_of,
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
USUAL = ("int8", "parameters on storage, backward", "several folders", "weights only")


@pytest.mark.parametrize("name", long_but(USUAL, CASES))
def test_a_save_beside_training_equals_one_that_training_waits_for(name: str, tmp_path: Path) -> None:
    """With a step between any two windows, each file is the same to the byte, and so is the rest of the training."""
    settings, turns = dict(CASES[name]), Turns()
    save = save_twice(tmp_path, weights_only=settings.pop("weights_only", False))
    with turns.taken():
        losses = train(tmp_path, turns, save, Progress(tmp_path / "beside"), **settings)
    assert turns.num_windows > 2 or name == "SGD", "training did not go on beside the save"
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")
    assert losses == train(tmp_path / "plain", **settings)
    assert contents(tmp_path / "end") == contents(tmp_path / "plain/end")


def test_a_save_of_two_processes_equals_one_that_they_wait_for(tmp_path: Path) -> None:
    """Both processes' files are the same to the byte."""
    assert min(on_ranks(save_on_two, tmp_path)) > 1
    assert len(contents(tmp_path / "beside")) > 4
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")


def write_from_outside(trainer: pl.Trainer, root: Path) -> None:
    """Change a master and a moment."""
    weight: Any = trainer.lightning_module.model.blocks[0].up.weight
    master = safe_get_full_fp32_param(weight)
    safe_set_full_fp32_param(weight, 2 * master)
    safe_set_full_optimizer_state(weight, torch.ones_like(master), "exp_avg")


def load(trainer: pl.Trainer, root: Path) -> None:
    """Go back to the checkpoint of before."""
    trainer.strategy.load_checkpoint(root / "waited")


MEANWHILE = {action.__name__: action for action in (write_from_outside, load)}


@pytest.mark.parametrize(
    ("action", "overlap"),
    long_but(
        [("write_from_outside", "forward"), ("load", "forward")],
        [(name, overlap) for name in MEANWHILE for overlap in ("forward", "backward")],
    ),
)
def test_what_happens_beside_a_save_changes_nothing_in_it(action: str, overlap: str, tmp_path: Path) -> None:
    """The files are those of a save that training waits for, and the training is as it is without one."""
    turns, plain = Turns(), tmp_path / "plain"
    with turns.taken():
        does = Hook(SAVE_AT + 1, lambda trainer: MEANWHILE[action](trainer, tmp_path))
        losses = train(tmp_path, turns, save_twice(tmp_path), does, overlap=overlap)
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")
    does = Hook(SAVE_AT + 1, lambda trainer: MEANWHILE[action](trainer, plain))
    assert losses == train(plain, save_twice(plain, beside=False), does, overlap=overlap)
    assert contents(tmp_path / "end") == contents(plain / "end")


def test_two_saves_with_a_skipped_step_between_them(tmp_path: Path) -> None:
    """Both are of one generation, so the second does not wait for the first; both are as if training had waited."""
    recipe = {"precision": "16-mixed", "nan_at": (SAVE_AT,)}

    def saves(root: Path, save: Callable[[pl.Trainer, Path], None]) -> list[pl.Callback]:
        def save_to(step: int, trainer: pl.Trainer) -> None:
            with one_name():
                save(trainer, root / f"{step}")
            assert root == plain or saves_of(trainer).will_exist(root / f"{SAVE_AT}")

        return [Hook(step, functools.partial(save_to, step)) for step in (SAVE_AT, SAVE_AT + 1)]

    turns, plain = Turns(), tmp_path / "plain"
    with turns.taken():
        train(tmp_path, turns, *saves(tmp_path, save_beside), recipe=recipe)
    train(plain, *saves(plain, pl.Trainer.save_checkpoint), recipe=recipe)
    for name in (f"{SAVE_AT}", f"{SAVE_AT + 1}", "end"):
        assert contents(tmp_path / name) == contents(plain / name)


class Counting(pl.Callback):
    """Keeps the counters of the training, and those of one save that it waits for."""

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.drain()
        saves_of(trainer).finish()
        self.counted: Traffic = strategy.traffic()
        trainer.save_checkpoint(trainer.default_root_dir + "/last")
        self.saved: Traffic = strategy.traffic() - self.counted
        extents = strategy.optimizers[0].partition.layout.extents
        self.state_bytes = sum(extent.nbytes for extent in extents.extents)


@pytest.mark.usefixtures("activations_as_asked")
def test_reads_of_a_save_have_a_counter_of_their_own(tmp_path: Path) -> None:
    """They are those of a save that training waits for, which reads the state once; the rest is as without a save."""
    beside, plain = Counting(), Counting()
    save = Hook(SAVE_AT, lambda trainer: save_beside(trainer, tmp_path / "beside"))
    train(tmp_path, save, beside, overlap="none")
    train(tmp_path / "plain", plain, overlap="none")
    assert beside.counted.background_read_bytes == beside.saved.shared_read_bytes == beside.state_bytes > 0
    assert plain.counted.background_read_bytes == beside.saved.background_read_bytes == 0
    for name in ("numel", "shared_read_bytes", "shared_write_bytes", "storage_write_bytes", "read_calls"):
        assert getattr(beside.counted, name) == getattr(plain.counted, name), name


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

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        assert (tmp_path / "own.ckpt/checkpoint").is_dir()

    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3)
    watch = Watch(folder)
    train(
        tmp_path,
        watch,
        Hook(SAVE_AT, save),
        checkpoint,
        trainer={"enable_checkpointing": True},
        transfer={"asynchronous": False},
    )
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
