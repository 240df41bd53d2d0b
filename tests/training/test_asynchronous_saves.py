"""Checkpoints that are saved beside the training are those that it waits for, whatever ends or fails beside a save."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.errors import CheckpointError, StorageFullError, StorageTimeoutError
from lightning_smartinfinity.storage.io import deadlines as in_time
from lightning_smartinfinity.storage.state.capacities import Capacities
from lightning_smartinfinity.storage.state.state_store import StateStore
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.save import background_saves
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.silent_disk import FILE_CALLS, SilentDisk
from tests.helpers.trainers import quiet_trainer
from tests.stock.systems import Hook
from tests.training.actions import does
from tests.training.asynchronous_worker import (
    SAVE_AT,
    Turns,
    contents,
    fail_on_second_rank,
    save_beside,
    save_on_two,
    save_twice,
    train,
)
from tests.training.storage_worker import StorageRun, end_of, launch

NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
IN_BF16 = {"precision": "bf16-mixed"}
WITHOUT_EPS: dict[str, Any] = {"optimizer": "SGD", "eps": None}


def write_from_outside(trainer: pl.Trainer) -> None:
    """Change a master and a moment."""
    weight: Any = trainer.lightning_module.model.blocks[0].up.weight
    master = safe_get_full_fp32_param(weight)
    safe_set_full_fp32_param(weight, 2 * master)
    safe_set_full_optimizer_state(weight, torch.ones_like(master), "exp_avg")


def changes_beside(saved: Path) -> list[pl.Callback]:
    """Return callbacks that write and load beside a save."""
    load = Hook(SAVE_AT + 2, lambda trainer: trainer.strategy.load_checkpoint(saved))
    return [Hook(SAVE_AT + 1, write_from_outside), load]


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
    "changes beside it, forward": {"changes": changes_beside, "overlap": "forward"},
    "changes beside it, backward": {"changes": changes_beside, "overlap": "backward"},
}
USUAL = ("fp16, skipped steps", "parameters on storage, backward", "weights only", "changes beside it, forward")


@pytest.mark.parametrize("name", long_but(USUAL, CASES))
def test_a_save_beside_training_equals_one_that_training_waits_for(name: str, tmp_path: Path) -> None:
    """With a step between any two windows, each file is the same to the byte, and so is the rest of the training.

    What a callback writes or loads meanwhile changes nothing in the save.
    """
    settings, turns = dict(CASES[name]), Turns()
    changes = settings.pop("changes", lambda _: [])
    save = save_twice(tmp_path, weights_only=settings.pop("weights_only", False))
    with turns.taken():
        losses = train(tmp_path, turns, save, *changes(tmp_path / "waited"), **settings)
    assert turns.num_windows > 2 or name == "SGD", "training did not go on beside the save"
    assert (
        contents(tmp_path / "beside") == contents(tmp_path / "waited")
        and losses == train(tmp_path / "plain", *changes(tmp_path / "waited"), **settings)
        and contents(tmp_path / "end") == contents(tmp_path / "plain/end")
    )


def test_a_save_of_two_processes_equals_one_that_they_wait_for(tmp_path: Path) -> None:
    """Both processes' files are the same to the byte."""
    assert (
        min(on_ranks(save_on_two, tmp_path)) > 1
        and len(contents(tmp_path / "beside")) > 4
        and contents(tmp_path / "beside") == contents(tmp_path / "waited")
    )


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
    assert contents(folder / "step=9.ckpt").keys() == contents(
        folder / "last.ckpt"
    ).keys() and "_save_checkpoint" not in vars(checkpoint)


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
    assert (
        room.share == pytest.approx(1 if waits or refused else 1.5, rel=0.02)
        and ("smart-infinity-save" not in watch.threads) == waits
        and found == [True] * 3 * (logger is LooksAtOnce)
    )
    assert not waits or watch.seen[3] == {"step=3.ckpt"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"step=3.ckpt", "step=6.ckpt", "step=9.ckpt"}
    told = [warning for warning in recwarn if "Training waits for checkpoints" in str(warning.message)]
    assert len(told) == num_warnings and noted == {(step, True) for step in (SAVE_AT, 3, 6, 9)}


# ---- what ends or fails beside a save: it is ended whole, or nothing of it has its name; ModelCheckpoints know which


def test_a_failed_save_ends_the_fit_of_all_processes(tmp_path: Path) -> None:
    """If the disk of one process is full, both raise at the next step, as of a save that they wait for."""
    saw = on_ranks(fail_on_second_rank, tmp_path)
    assert (
        all(each["error"].startswith("CheckpointError: ") and "No space left" in each["error"] for each in saw)
        and saw[0]["before"] == saw[1]["before"] == contents(tmp_path / "c.ckpt")
        and saw[0]["step"] == saw[1]["step"] == SAVE_AT
    )


def test_a_failure_near_the_end_is_raised_by_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails after the last step makes the fit fail."""
    monkeypatch.setattr(folder_swap, "put_save_in_place", Mock(side_effect=OSError(5, "Input/output error")))
    turns = Turns()
    save = Hook(SAVE_AT, lambda trainer: save_beside(trainer, tmp_path / "c.ckpt"))
    with turns.taken(), pytest.raises(CheckpointError, match="could not be put in place"):
        train(tmp_path, turns, save)
    assert not (tmp_path / "c.ckpt").exists()


def test_a_disk_that_does_not_answer(tmp_path: Path, disk: SilentDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is given up, the fit ends with the error of one that it waits for, and the old checkpoint is whole."""
    monkeypatch.setattr(background_saves, "io_limit", lambda _: in_time.io_limit(0.3))
    device = Mock(wraps=background_saves.HostDevice)
    monkeypatch.setattr(background_saves, "HostDevice", device)
    disk.works_until_it_hangs()
    path, before, turns = tmp_path / "c.ckpt", dict[str, bytes](), Turns()

    def is_of_checkpoint(descriptor: int, *_: Any) -> bool:
        return "optim_states" in os.readlink(f"/proc/self/fd/{descriptor}")

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(path)
        before.update(contents(path))

    def save_again(trainer: pl.Trainer) -> None:
        save_beside(trainer, path)
        disk.hang(os, "pwrite", when=is_of_checkpoint)

    with turns.taken(), pytest.raises(StorageTimeoutError, match=r"Writing '.*optim_states.pt' did not return"):
        train(tmp_path, turns, Hook(1, save), Hook(SAVE_AT, save_again), transfer={"io_timeout": 77.0})
    assert disk.hung
    assert device.call_args.kwargs["io_timeout"] == 77.0, "reads of the state have no limit"
    assert {name: content for name, content in contents(path).items() if ".saving" not in name} == before


def test_saves_of_callbacks_wait_for_no_disk_without_a_limit(tmp_path: Path, disk: SilentDisk) -> None:
    """Each call by which they look for, write, link and remove checkpoints would be given up."""

    def watch(*_: object) -> None:
        for module, name in [*FILE_CALLS, (os, "symlink")]:
            disk.hang(module, name, when=lambda *_: False)

    keeper = ModelCheckpoint(tmp_path / "c", **KEPT["linked"])
    callbacks = [does(on_train_start=watch), keeper]
    trainer = quiet_trainer(tmp_path, max_steps=4, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(LitTiny(Recipe()))
    disk.answer()
    assert sorted(os.listdir(tmp_path / "c")) == ["last.ckpt", "step=4.ckpt"]
    trainer.strategy.close()  # type: ignore[attr-defined]


BEST: dict[str, Any] = {"monitor": "loss", "save_top_k": 1, "every_n_train_steps": 1, "filename": "{step}"}
KEPT: dict[str, dict[str, Any]] = {
    "best and last": {**BEST, "save_last": True},
    "newest": {"every_n_train_steps": 2, "filename": "{step}"},
    "linked": {"every_n_train_steps": 2, "filename": "{step}", "save_last": "link"},
    "worst": {**BEST, "mode": "max", "save_top_k": 2, "save_last": "link"},
    "each epoch": {"filename": "{epoch}", "monitor": "val_loss", "save_top_k": 2, "save_last": True},
}
LAST = "last.ckpt, beside every step"
NUM_LONG = 25


def fit_saving(folder: Path, kept: str, *, ends: int | None = None, **settings: Any) -> tuple[int, str]:
    """Fit in processes of their own that save to ``last.ckpt``, or by a ModelCheckpoint, whose best they evaluate."""
    saving = {"save_every": 1} if kept == LAST else {"checkpoints": [KEPT[kept]], "options": {"overlap": "none"}}
    settings = {"module": {"width": 128}, "epochs": 2, **saving, **settings}
    return launch(StorageRun(out=str(folder), storage=str(folder / "storage"), **settings), ends=ends)


def assert_agree(folder: Path) -> None:
    """Assert that the index of an ended fit names all checkpoints that there are, and that these are whole."""
    named = {path for index in end_of(folder)["index"] for path in index if path} or {str(folder / "last.ckpt")}
    assert named == {str(path) for path in folder.rglob("*.ckpt")} and not list(folder.rglob(".saving*"))
    for path in named:
        assert main(["scrub", path, "--quiet"]) == 0


IN_COPY, BETWEEN, BEFORE_RECORD, BEFORE_LINK = (
    "kill within the copy of a ModelCheckpoint's save",
    "kill beside a ModelCheckpoint's saves",
    "kill between a ModelCheckpoint's save and the next record",
    "kill before a ModelCheckpoint links its last save",
)
WAITING = {"transfer": {"asynchronous": False}, "trainer": {"precision": "32-true"}}
COMPRESSED = {**WAITING, "options": {"overlap": "none", "compression": {"ratio": 0.05}}}
KILLS: list[tuple[str, str, int, dict[str, Any], dict[str, Any]]] = [
    *(
        (IN_COPY, kept, devices, {"kill_at": "kill at copy", "kill_step": save, "kill_rank": devices - 1}, {})
        for kept in KEPT
        for save in (1, 2, 3)
        for devices in (1, 2)
    ),
    # Each process has scores of its own, by which it then finds the best one.
    (BETWEEN, "worst", 2, {"kill_at": "kill at batch start", "kill_step": 4, "kill_rank": 1}, {}),
    *(
        (BEFORE_RECORD, "newest", 1, {"kill_at": "kill at saved batch end", "kill_step": 4}, settings)
        for settings in (WAITING, COMPRESSED)
    ),
    *(  # the link of the last step
        (BEFORE_LINK, "linked", devices, {"kill_at": "kill at link", "kill_step": 6 // devices}, {})
        for devices in (1, 2)
    ),
]
IN_SECOND_COPY = next(case for case in KILLS if case[1:3] == ("newest", 2) and case[3]["kill_step"] == 2)
ALWAYS = [IN_SECOND_COPY, next(case for case in KILLS if case[4] is COMPRESSED), KILLS[-2]]


@pytest.mark.parametrize(("what", "kept", "devices", "moment", "settings"), long_but(ALWAYS, KILLS))
def test_a_kill_beside_a_save(
    what: str, kept: str, devices: int, moment: Any, settings: dict[str, Any], tmp_path: Path, attack: Attack
) -> None:
    """What was whole stays in the index and on disk, and is linked; parts of a save go, whether it is saved again."""
    attack(what, tries=1, outcome="its index and its folder agree")
    # Nothing else kills it. With several ranks, another one may have removed what was written before it ended.
    fit_saving(tmp_path, kept, devices=devices, **moment, **settings, ends=-signal.SIGKILL)
    if what == BEFORE_RECORD:
        assert (tmp_path / "saved/step=4.ckpt").exists() and not list(tmp_path.rglob(".saving*"))
    fit_saving(tmp_path, kept, devices=devices, resume=True, seed=9, **settings, ends=0)
    assert_agree(tmp_path)
    if what == BEFORE_LINK:
        assert (tmp_path / "saved/last.ckpt").resolve().name == f"step={12 // devices}.ckpt"


@pytest.mark.parametrize(
    ("how", "devices"),
    # test_another_number_of_processes always has an error beside a save.
    long_but([("term", 2)], [("term", 1), ("term", 2), ("interrupt", 2), ("error", 1), ("error", 2)]),
)
def test_what_ends_one_process_lets_its_save_end(how: str, devices: int, tmp_path: Path, attack: Attack) -> None:
    """The save is ended whole, leaves nothing else, and the training resumes from storage to the same bits."""
    attack("SIGTERM, Ctrl-C or an error beside a save", tries=1, outcome="checkpoint and store are whole")
    straight, folder = tmp_path / "straight", tmp_path / "ended"
    fit_saving(straight, LAST, devices=devices, ends=0)
    moment = {"kill_at": f"{how} at batch start", "kill_step": 3, "kill_rank": devices - 1}
    code, output = fit_saving(folder, LAST, devices=devices, **moment)
    assert (code == 0) == (how == "term") and not (folder / "end-0.json").exists(), output[-4000:]
    assert not list(folder.rglob(".saving*")) and main(["scrub", str(folder / "last.ckpt"), "--quiet"]) == 0
    fit_saving(folder, LAST, devices=devices, resume=True, ends=0)
    assert end_of(folder)["state"] == end_of(straight)["state"]


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kept", [LAST, *KEPT])
def test_kills_at_random(kept: str, devices: int, tmp_path: Path, attack: Attack) -> None:
    """Whenever kills come, the resumed fit ends with the bits and checkpoints of one that never stopped."""
    if kept == LAST:
        attack(
            "kill while a checkpoint is saved beside training",
            tries=NUM_LONG,
            outcome="checkpoint and store are whole",
        )
    else:
        attack("kill beside a ModelCheckpoint's saves", tries=NUM_LONG, outcome="its index and its folder agree")
    straight = tmp_path / "straight"
    fit_saving(straight, kept, devices=devices, ends=0)
    draw, killed, chains, within = random.Random(f"{kept} {devices}"), 0, 0, 0
    while killed < NUM_LONG:
        folder, code, kills = tmp_path / f"{chains}", -signal.SIGKILL, 0
        chains += 1
        while code == -signal.SIGKILL:
            moment = {
                "kill_at": "kill at batch start" if kills < 5 else "",
                "kill_step": 1 + 2 * kills,
                "kill_after": draw.uniform(0.001, 0.2),
                "kill_rank": draw.randrange(devices),
            }
            code, output = fit_saving(folder, kept, devices=devices, resume=kills > 0, seed=9 if kills else 1, **moment)
            kills += code == -signal.SIGKILL
            within += code == -signal.SIGKILL and any(folder.rglob(".saving*"))
        assert code == 0, output[-4000:]
        assert chains < 4 * NUM_LONG
        killed += kills
        assert_agree(folder)
        assert end_of(folder)["state"] == end_of(straight)["state"]
    assert kept != LAST or within > killed // 5, "few kills came within a save"
