"""A checkpoint folder that is opened as if it were a file is answered with the command that makes a file of it."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, call

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file

from lightning_smartinfinity import checkpoint_hint
from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.cli import main
from tests.fabric.worker import quiet_fabric
from tests.helpers.assertions import assert_equal
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.universal import convert_by_command
from tests.helpers.waiting import PROCESS_LIMIT

RECIPE = Recipe(depth=1)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> pl.Trainer:
    """Return a Trainer of ours whose fit is over."""
    return fit(LitTiny(RECIPE), tmp_path_factory.mktemp("run"), max_steps=1, precision="32-true")


@pytest.fixture(scope="module")
def checkpoint(trainer: pl.Trainer) -> Path:
    """Return the path of a checkpoint of ours."""
    path = Path(trainer.default_root_dir) / "a last.ckpt"
    trainer.save_checkpoint(path)
    return path


OPENED: dict[str, Callable[[Path], object]] = {
    "torch.load": torch.load,
    "load_from_checkpoint": lambda checkpoint: LitTiny.load_from_checkpoint(checkpoint, recipe=RECIPE),
    "a Trainer with another strategy": lambda checkpoint: quiet_trainer(
        checkpoint.parent, "auto", precision="32-true"
    ).fit(LitTiny(RECIPE), ckpt_path=checkpoint),
}


@pytest.mark.parametrize("opened_by", OPENED)
def test_a_checkpoint_opened_as_a_file(
    opened_by: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the error ends the program, the command that makes a file follows the traceback."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    checkpoint_hint.install()
    with pytest.raises(IsADirectoryError) as caught:
        OPENED[opened_by](checkpoint)
    sys.excepthook(caught.type, caught.value, caught.tb)
    traceback, hint = capsys.readouterr().err.split("IsADirectoryError: ")
    assert "Traceback" in traceback
    assert f"smart-infinity export {shlex.quote(str(checkpoint))} module.ckpt --to lightning" in hint


def test_a_program_that_ends_by_it(tmp_path: Path) -> None:
    """A program that imports nothing but torch is told, too."""
    (tmp_path / NOTE_NAME).write_text("Make a file of it.\n")
    ended = subprocess.run(
        [sys.executable, "-c", "import sys, torch; torch.load(sys.argv[1])", str(tmp_path)],
        cwd=tmp_path,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert ended.returncode == 1 and ended.stderr.split("IsADirectoryError")[1].endswith("\nMake a file of it.\n")


@pytest.mark.parametrize(
    "error",
    [
        IsADirectoryError(errno.EISDIR, "Is a directory", os.curdir),
        IsADirectoryError(errno.EISDIR, "Is a directory", 3),
        IsADirectoryError("without a path"),
        FileNotFoundError(errno.ENOENT, "No such file", "a.ckpt"),
        PermissionError(errno.EACCES, "Permission denied", "ours.ckpt"),
        ValueError("a.ckpt"),
    ],
    ids=repr,
)
def test_another_error(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown by the hook that was there before, and nothing is printed besides."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.ckpt").mkdir()
    (tmp_path / "ours.ckpt" / NOTE_NAME).touch()
    shown, written = Mock(), Mock()
    monkeypatch.setattr(sys, "excepthook", shown)
    for _ in range(2):
        checkpoint_hint.install()
    monkeypatch.setattr(sys.stderr, "write", written)
    sys.excepthook(type(error), error, None)
    assert (shown.mock_calls, written.mock_calls) == ([call(type(error), error, None)], [])


@pytest.mark.parametrize("universal", [False, True])
def test_a_folder_that_someone_finds(
    universal: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint holds instructions, and the command in them makes a file for load_from_checkpoint."""
    monkeypatch.chdir(tmp_path)
    if universal:
        checkpoint = convert_by_command(checkpoint, tmp_path / "universal")
    text = (checkpoint / NOTE_NAME).read_text()
    (command,) = (line.strip() for line in text.splitlines() if "--to lightning" in line)
    name, *arguments = shlex.split(command)
    assert name == "smart-infinity" and main(arguments) == 0
    module = LitTiny.load_from_checkpoint("module.ckpt", recipe=RECIPE)
    assert_equal(module.state_dict(), torch.load("module.ckpt", weights_only=False)["state_dict"])


@pytest.mark.parametrize("universal", [False, True])
def test_a_folder_of_fabric_that_someone_finds(
    universal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note in such a folder does not speak of ckpt_path, and the commands in it give the weights."""
    fabric = quiet_fabric(tmp_path)
    given = torch.nn.Linear(3, 2)
    model, optimizer = fabric.setup(given, torch.optim.AdamW(given.parameters()))
    fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    checkpoint = convert_by_command(tmp_path / "saved", tmp_path / "universal") if universal else tmp_path / "saved"
    text = (checkpoint / NOTE_NAME).read_text()
    assert "fabric.load" in text and "resume_from_checkpoint" in text and "ckpt_path" not in text
    monkeypatch.chdir(tmp_path)
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    with deepspeed.zero.GatheredParameters(list(given.parameters())):
        found = load_file("weights/model.safetensors")
        assert_equal(
            {name.removeprefix("_forward_module."): value for name, value in found.items()}, given.state_dict()
        )
    fabric.strategy.close()


@pytest.mark.parametrize("make", [lambda note: note.write_text("mine"), Path.mkdir, os.mkfifo])
def test_what_a_user_keeps_under_the_name_of_the_instructions(
    make: Callable[[Path], object], trainer: pl.Trainer, tmp_path: Path
) -> None:
    """It stays, with a warning. Instructions of ours, of whatever path, are replaced."""
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    note = path / NOTE_NAME
    ours = note.read_text()
    note.write_text(ours.replace(str(path), "/elsewhere"))
    trainer.save_checkpoint(path)
    assert note.read_text() == ours
    note.unlink()
    make(note)
    kept = note.lstat()
    with pytest.warns(UserWarning, match=f"{note} is not what this package writes there, and stays"):
        trainer.save_checkpoint(path)
    assert (note.lstat().st_ino, note.lstat().st_size) == (kept.st_ino, kept.st_size)
