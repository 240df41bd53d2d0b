"""What ends or fails beside a save: the save is ended whole, or nothing of it lies under its name."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import CheckpointError, StorageCorruptError, StorageTimeoutError
from lightning_smartinfinity.storage.io import deadlines as in_time
from lightning_smartinfinity.storage.state.pin import Pin
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.save import background_saves
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import Hold
from tests.helpers.processes import run_module
from tests.helpers.silent_disk import SilentDisk
from tests.training.asynchronous_worker import (
    SAVE_AT,
    SaveTwice,
    Turns,
    contents,
    digests,
    fail_on_last_rank,
    save_beside,
    train,
)
from tests.training.storage_worker import StorageRun, end_of, launch

EVERY = 1_000_000
NUM_KILLS = 30


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
    assert saw["step"] < 9 and saw["before"] == digests(tmp_path / "c.ckpt")


def test_a_failed_save_ends_the_fit_of_all_processes(tmp_path: Path) -> None:
    """If the disk of one process is full, both raise, at the same step."""
    done = run_module("tests.training.asynchronous_worker", tmp_path, "2", "full", ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    saw = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert all("No space left" in each["error"] for each in saw)
    assert saw[0]["before"] == saw[1]["before"] == digests(tmp_path / "c.ckpt")
    assert saw[0]["step"] == saw[1]["step"]


def test_a_failure_near_the_end_is_raised_by_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails after the last step makes the fit fail."""

    def refused(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder_swap, "put_save_in_place", refused)
    turns = Turns()

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == SAVE_AT:
                save_beside(trainer, tmp_path / "c.ckpt")

    with turns.taken(), pytest.raises(CheckpointError, match="could not be put in place"):
        train(tmp_path, turns, Save())
    assert not (tmp_path / "c.ckpt").exists()


def raises(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


def sends(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


ENDS = [raises(RuntimeError("an error of the user's")), sends(signal.SIGINT), sends(signal.SIGTERM)]


@pytest.mark.parametrize("end", long_but([ENDS[0], ENDS[2]], ENDS), ids=["error", "SIGINT", "SIGTERM"])
def test_what_ends_a_fit_lets_its_save_end(end: Callable[[], None], tmp_path: Path) -> None:
    """After an error, Ctrl-C or SIGTERM the checkpoint that was being saved is whole, and nothing else is left."""
    turns = Turns()

    class End(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == SAVE_AT + 1:
                assert not (tmp_path / "beside").exists()
                end()

    with turns.taken(), pytest.raises((RuntimeError, SystemExit)):
        train(tmp_path, turns, SaveTwice(tmp_path), End())
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")
    assert not list(tmp_path.glob(".saving*"))


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
        code, output = launch(run_of(folder, devices))
        assert code == 0, output[-4000:]
        return end_of(folder)

    return ends


def assert_whole(folder: Path, devices: int) -> dict[str, Any]:
    """Assert that the checkpoint is whole, and return how the fit ends once it was resumed from storage."""
    assert main(["scrub", str(folder / "last.ckpt"), "--quiet"]) == 0
    code, output = launch(run_of(folder, devices, resume=True))
    assert code == 0, output[-4000:]
    return end_of(folder)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_a_kill_within_a_copy(
    devices: int, straight_run: Callable[[int], dict[str, Any]], tmp_path: Path, attack: Attack
) -> None:
    """The checkpoint of before is whole, and the training resumes from storage to the same bits.

    ``test_a_kill_within_a_copy`` of ``test_checkpoint_index.py`` always runs, with two processes, as do kills at random
    of ``test_storage_resume_kills.py``, which compare all bits.
    """
    attack("kill while a checkpoint is saved beside training", tries=1, outcome="checkpoint and store are whole")
    killed = run_of(tmp_path, devices, kill_at="kill at copy", kill_step=4, kill_rank=devices - 1)
    code, output = launch(killed)
    # Nothing else kills it. With several ranks, another one may have removed what was written before it ended.
    assert code == -signal.SIGKILL, output[-4000:]
    assert assert_whole(tmp_path, devices)["state"] == straight_run(devices)["state"]


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_kills_beside_saves(
    devices: int, straight_run: Callable[[int], dict[str, Any]], tmp_path: Path, attack: Attack
) -> None:
    """After each kill the checkpoint is whole, and the training resumes from storage to the same bits."""
    attack(
        "kill while a checkpoint is saved beside training", tries=NUM_KILLS, outcome="checkpoint and store are whole"
    )
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
    long_but([("term", 2)], [("term", 1), ("term", 2), ("interrupt", 2), ("error", 2)]),
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


class SaveAgain(pl.Callback):
    """Saves to one path, first so that training waits, and later beside it.

    Args:
        path: The path.
        then: Is called when the second save has begun.
    """

    def __init__(self, path: Path, then: Callable[[], object] = lambda: None) -> None:
        self.path, self._then = path, then
        self.before: dict[str, bytes] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)
            self.before = contents(self.path)
        if trainer.global_step == SAVE_AT:
            save_beside(trainer, self.path)
            self._then()

    def assert_kept(self) -> None:
        """Assert that the path holds the first save."""
        files = contents(self.path).items()
        assert {name: content for name, content in files if ".saving" not in name} == self.before


def test_a_disk_that_does_not_answer(tmp_path: Path, disk: SilentDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is given up, the fit ends with the error of one that it waits for, and the old checkpoint is whole."""
    monkeypatch.setattr(background_saves, "io_limit", lambda _: in_time.io_limit(0.3))
    disk.works_until_it_hangs()

    def is_of_checkpoint(descriptor: int, *_: Any) -> bool:
        return "optim_states" in os.readlink(f"/proc/self/fd/{descriptor}")

    save = SaveAgain(tmp_path / "c.ckpt", then=lambda: disk.hang(os, "pwrite", when=is_of_checkpoint))
    turns = Turns()
    with turns.taken(), pytest.raises(StorageTimeoutError, match=r"Writing '.*optim_states.pt' did not return"):
        train(tmp_path, turns, save)
    assert disk.hung
    save.assert_kept()


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
    turns, save = Turns(), SaveAgain(tmp_path / "c.ckpt")
    with turns.taken(), pytest.raises(StorageTimeoutError, match=r"reading \d+ bytes at offset .* did not return"):
        train(tmp_path, turns, save)
    holds[0].release()
    save.assert_kept()
