"""What ends or fails beside a save: it is ended whole, or nothing of it has its name; ModelCheckpoints know which."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.errors import CheckpointError, StorageTimeoutError
from lightning_smartinfinity.storage.io import deadlines as in_time
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.save import background_saves
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.ranks import on_ranks
from tests.helpers.silent_disk import SilentDisk
from tests.stock.systems import Hook
from tests.training.asynchronous_worker import (
    NUM_STEPS,
    SAVE_AT,
    Turns,
    contents,
    fail_on_second_rank,
    save_beside,
    train,
)
from tests.training.storage_worker import StorageRun, end_of, launch


def test_a_failed_save_ends_the_fit_of_all_processes(tmp_path: Path) -> None:
    """If the disk of one process is full, both raise at the next step, as of a save that they wait for."""
    saw = on_ranks(fail_on_second_rank, tmp_path)
    assert all(each["error"].startswith("CheckpointError: ") and "No space left" in each["error"] for each in saw)
    assert saw[0]["before"] == saw[1]["before"] == contents(tmp_path / "c.ckpt")
    assert saw[0]["step"] == saw[1]["step"] < NUM_STEPS


def test_a_failure_near_the_end_is_raised_by_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails after the last step makes the fit fail."""

    def refused(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder_swap, "put_save_in_place", refused)
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


def run(folder: Path, kept: str, *, ends: int | None = None, **settings: Any) -> tuple[int, str]:
    """Fit in processes of their own that save to ``last.ckpt``, or by a ModelCheckpoint, whose best they evaluate."""
    saving = {"save_every": 1} if kept == LAST else {"checkpoints": [KEPT[kept]], "options": {"overlap": "none"}}
    settings = {"module": {"width": 128}, "epochs": 2, **saving, **settings}
    return launch(StorageRun(out=str(folder), storage=str(folder / "storage"), **settings), ends=ends)


def assert_agree(folder: Path) -> None:
    """Assert that the index of an ended fit names all checkpoints that there are, and that these are whole."""
    named = {path for index in end_of(folder)["index"] for path in index if path} or {str(folder / "last.ckpt")}
    assert named == {str(path) for path in folder.rglob("*.ckpt")}
    assert not list(folder.rglob(".saving*"))
    for path in named:
        assert main(["scrub", path, "--quiet"]) == 0


IN_COPY, BEFORE_RECORD, BEFORE_LINK = (
    "kill within the copy of a ModelCheckpoint's save",
    "kill between a ModelCheckpoint's save and the next record",
    "kill before a ModelCheckpoint links its last save",
)
WAITING = {"transfer": {"asynchronous": False}, "trainer": {"precision": "32-true"}}
COMPRESSED = {**WAITING, "options": {"overlap": "none", "compression": {"ratio": 0.05}}}
CASES: list[tuple[str, str, int, dict[str, Any], dict[str, Any]]] = [
    *(
        (IN_COPY, kept, devices, {"kill_at": "kill at copy", "kill_step": save, "kill_rank": devices - 1}, {})
        for kept in KEPT
        for save in (1, 2, 3)
        for devices in (1, 2)
    ),
    *(
        (BEFORE_RECORD, "newest", 1, {"kill_at": "kill at saved batch end", "kill_step": 4}, settings)
        for settings in (WAITING, COMPRESSED)
    ),
    *(  # the link of the last step
        (BEFORE_LINK, "linked", devices, {"kill_at": "kill at link", "kill_step": 6 // devices}, {})
        for devices in (1, 2)
    ),
]
IN_SECOND_COPY = next(case for case in CASES if case[1:3] == ("newest", 2) and case[3]["kill_step"] == 2)
ALWAYS = [IN_SECOND_COPY, next(case for case in CASES if case[4] is COMPRESSED), CASES[-2]]


@pytest.mark.parametrize(("what", "kept", "devices", "moment", "settings"), long_but(ALWAYS, CASES))
def test_a_kill_beside_a_save(
    what: str, kept: str, devices: int, moment: Any, settings: dict[str, Any], tmp_path: Path, attack: Attack
) -> None:
    """What was whole stays in the index and on disk, and is linked; parts of a save go, whether it is saved again."""
    attack(what, tries=1, outcome="its index and its folder agree")
    # Nothing else kills it. With several ranks, another one may have removed what was written before it ended.
    run(tmp_path, kept, devices=devices, **moment, **settings, ends=-signal.SIGKILL)
    if what == BEFORE_RECORD:
        assert (tmp_path / "saved/step=4.ckpt").exists() and not list(tmp_path.rglob(".saving*"))
    run(tmp_path, kept, devices=devices, resume=True, seed=9, **settings, ends=0)
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
    run(straight, LAST, devices=devices, ends=0)
    moment = {"kill_at": f"{how} at batch start", "kill_step": 3, "kill_rank": devices - 1}
    code, output = run(folder, LAST, devices=devices, **moment)
    assert (code == 0) == (how == "term") and not (folder / "end-0.json").exists(), output[-4000:]
    assert not list(folder.rglob(".saving*"))
    assert main(["scrub", str(folder / "last.ckpt"), "--quiet"]) == 0
    run(folder, LAST, devices=devices, resume=True, ends=0)
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
    run(straight, kept, devices=devices, ends=0)
    draw, killed, chains = random.Random(f"{kept} {devices}"), 0, 0
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
            code, output = run(folder, kept, devices=devices, resume=kills > 0, seed=9 if kills else 1, **moment)
            kills += code == -signal.SIGKILL
        assert code == 0, output[-4000:]
        assert chains < 4 * NUM_LONG
        killed += kills
        assert_agree(folder)
        assert end_of(folder)["state"] == end_of(straight)["state"]
