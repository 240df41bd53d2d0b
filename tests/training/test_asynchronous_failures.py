"""What ends or fails beside a save: it is ended whole, or nothing of it has its name; ModelCheckpoints know which."""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import CheckpointError, StorageTimeoutError
from lightning_smartinfinity.storage.io import deadlines as in_time
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.save import background_saves
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import Hold
from tests.helpers.ranks import on_ranks
from tests.helpers.silent_disk import SilentDisk
from tests.helpers.trainers import quiet_trainer
from tests.stock.systems import Hook
from tests.training.asynchronous_worker import (
    NUM_STEPS,
    SAVE_AT,
    Turns,
    contents,
    digests,
    fail_on_second_rank,
    save_beside,
    train,
)
from tests.training.storage_worker import StorageRun, end_of, launch

EVERY = 1_000_000
NUM_KILLS = 30


def test_a_failed_save_ends_the_fit_of_all_processes(tmp_path: Path) -> None:
    """If the disk of one process is full, both raise at the next step, as of a save that they wait for."""
    saw = on_ranks(fail_on_second_rank, tmp_path)
    assert all(each["error"].startswith("CheckpointError: ") and "No space left" in each["error"] for each in saw)
    assert saw[0]["before"] == saw[1]["before"] == digests(tmp_path / "c.ckpt")
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


def run_of(folder: Path, devices: int, **settings: Any) -> StorageRun:
    """Return a fit that saves to ``last.ckpt`` beside every step."""
    return StorageRun(
        out=str(folder),
        storage=str(folder / "storage"),
        devices=devices,
        save_every=1,
        transfer={"keep": "on-failure"},
        module={"width": 128},
        **settings,
    )


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """Return a function that tells how a fit of so many processes ends that nothing interrupts."""

    @functools.cache
    def ends(devices: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("straight")
        launch(run_of(folder, devices), ends=0)
        return end_of(folder)

    return ends


def assert_whole(folder: Path, devices: int) -> dict[str, Any]:
    """Assert that the checkpoint is whole, and return how the fit ends once it was resumed from storage."""
    assert main(["scrub", str(folder / "last.ckpt"), "--quiet"]) == 0
    launch(run_of(folder, devices, resume=True), ends=0)
    return end_of(folder)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_kills_beside_saves(
    devices: int, straight_run: Callable[[int], dict[str, Any]], tmp_path: Path, attack: Attack
) -> None:
    """After a kill within a copy, and at random, the checkpoint is whole, and the training resumes to the same bits.

    Of kills within a copy one of ``test_a_kill_beside_a_save`` always runs, and so do kills at random in
    ``test_storage_resume_kills.py``.
    """
    attack(
        "kill while a checkpoint is saved beside training",
        tries=NUM_KILLS + 1,
        outcome="checkpoint and store are whole",
    )
    copying = {"kill_at": "kill at copy", "kill_step": 4, "kill_rank": devices - 1}
    # Nothing else kills it. With several ranks, another one may have removed what was written before it ended.
    assert launch(run_of(tmp_path / "copy", devices, **copying))[0] == -signal.SIGKILL
    assert assert_whole(tmp_path / "copy", devices)["state"] == straight_run(devices)["state"]
    straight, draw, num_killed, num_within = straight_run(devices), random.Random(devices), 0, 0
    for number in range(4 * NUM_KILLS):
        folder, step, after = tmp_path / f"{number}", 3 + number % 5, draw.uniform(0.001, 0.1)
        kills = {"kill_at": "kill at save", "kill_step": step, "kill_after": after, "kill_rank": number % devices}
        code, output = launch(run_of(folder, devices, **kills))
        assert code in (0, -signal.SIGKILL), output[-4000:]
        if code == 0:  # it has escaped
            continue
        num_killed += 1
        num_within += (folder / "last.ckpt/.saving").exists()
        assert assert_whole(folder, devices)["state"] == straight["state"]
        if num_killed == NUM_KILLS:
            break
    assert num_killed == NUM_KILLS, "too many fits escaped their kill"
    assert num_within > NUM_KILLS // 5, "few kills came within a save"


@pytest.mark.parametrize(
    ("how", "devices"),
    long_but([("term", 2), ("error", 1)], [("term", 1), ("term", 2), ("interrupt", 2), ("error", 1), ("error", 2)]),
)
def test_what_ends_one_process_lets_its_save_end(
    how: str, devices: int, straight_run: Callable[[int], dict[str, Any]], tmp_path: Path, attack: Attack
) -> None:
    """The save is ended whole, leaves nothing else, and the training resumes from storage to the same bits."""
    attack("SIGTERM, Ctrl-C or an error beside a save", tries=1, outcome="checkpoint and store are whole")
    straight, folder = straight_run(devices), tmp_path / "ended"
    code, output = launch(run_of(folder, devices, kill_at=f"{how} at batch start", kill_step=5, kill_rank=devices - 1))
    assert (code == 0) == (how == "term") and not (folder / "end-0.json").exists(), output[-4000:]
    assert not list(folder.rglob(".saving*"))
    assert assert_whole(folder, devices)["state"] == straight["state"]


def assert_old_save_kept(root: Path, then: Callable[[], object], error: str) -> None:
    """Save to one path, first so that training waits, and then beside it, which fails; the path holds the first save.

    Args:
        root: The folder of the training.
        then: Is called when the second save has begun.
        error: What the error of the fit says.
    """
    path, before, turns = root / "c.ckpt", dict[str, bytes](), Turns()

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(path)
        before.update(contents(path))

    def save_again(trainer: pl.Trainer) -> None:
        save_beside(trainer, path)
        then()

    with turns.taken(), pytest.raises(StorageTimeoutError, match=error):
        train(root, turns, Hook(1, save), Hook(SAVE_AT, save_again))
    assert {name: content for name, content in contents(path).items() if ".saving" not in name} == before


def test_a_disk_that_does_not_answer(tmp_path: Path, disk: SilentDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is given up, the fit ends with the error of one that it waits for, and the old checkpoint is whole."""
    monkeypatch.setattr(background_saves, "io_limit", lambda _: in_time.io_limit(0.3))
    disk.works_until_it_hangs()

    def is_of_checkpoint(descriptor: int, *_: Any) -> bool:
        return "optim_states" in os.readlink(f"/proc/self/fd/{descriptor}")

    hang = lambda: disk.hang(os, "pwrite", when=is_of_checkpoint)  # noqa: E731
    assert_old_save_kept(tmp_path, hang, r"Writing '.*optim_states.pt' did not return")
    assert disk.hung


def test_state_that_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If storage does not answer the copy's reads, the fit ends with the error of its own reads."""
    holds: list[Hold] = []

    class Held(HostDevice):
        """A device whose third read does not return."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "io_timeout": 0.3})

        def open(self, **settings: Any) -> None:
            super().open(**settings)
            holds.append(Hold(self.pipeline, read_at=2, count=EVERY))

    monkeypatch.setattr(background_saves, "HostDevice", Held)
    assert_old_save_kept(tmp_path, lambda: None, r"reading \d+ bytes at offset .* did not return")
    holds[0].release()


BEST: dict[str, Any] = {"monitor": "loss", "save_top_k": 1, "every_n_train_steps": 1, "filename": "{step}"}
KEPT: dict[str, dict[str, Any]] = {
    "best and last": {**BEST, "save_last": True},
    "newest": {"every_n_train_steps": 2, "filename": "{step}"},
    "linked": {"every_n_train_steps": 2, "filename": "{step}", "save_last": "link"},
    "worst": {**BEST, "mode": "max", "save_top_k": 2, "save_last": "link"},
    "each epoch": {"filename": "{epoch}", "monitor": "val_loss", "save_top_k": 2, "save_last": True},
}
NUM_LONG = 25


def run(folder: Path, kept: str, *, ends: int | None = None, **settings: Any) -> tuple[int, str]:
    """Fit in processes of their own, and evaluate the best checkpoint."""
    settings = {"options": {"overlap": "none"}, "module": {"width": 128}, "epochs": 2, **settings}
    return launch(
        StorageRun(out=str(folder), storage=str(folder / "storage"), checkpoints=[KEPT[kept]], **settings), ends=ends
    )


def assert_agree(folder: Path) -> None:
    """Assert that the index of an ended fit names all checkpoints that there are, and that these are whole."""
    named = {path for path in end_of(folder)["index"][0] if path}
    assert named == {str(path) for path in (folder / "saved").iterdir()}
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


class Denser(ModelCheckpoint):
    """A ModelCheckpoint that saves more often from the second step on, which changes the key of its state."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self._every_n_train_steps = 1


def test_a_callback_whose_settings_change(tmp_path: Path) -> None:
    """The training goes on, and the index names what is there."""
    saving = Denser(tmp_path / "saved", every_n_train_steps=2, filename="{step}")
    trainer = quiet_trainer(tmp_path, max_steps=4, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(LitTiny(Recipe()))
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step=4.ckpt"]
    assert saving.best_model_path == str(tmp_path / "saved" / "step=4.ckpt")


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kept", KEPT)
def test_kills_at_random(kept: str, devices: int, tmp_path: Path, attack: Attack) -> None:
    """Whenever kills come, the resumed fit ends with the checkpoints of one that never stopped, if none was lost."""
    attack("kill beside a ModelCheckpoint's saves", tries=NUM_LONG, outcome="its index and its folder agree")
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
