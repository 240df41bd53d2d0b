"""A killed save leaves either the previous checkpoint or the new one intact."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.processes import run_module
from tests.training.killed_save_worker import CODEC, RECIPE, TRANSFER
from tests.training.worker import Run, train


def killed(folder: Path, devices: int, when: str) -> None:
    done = run_module("tests.training.killed_save_worker", folder, str(devices), when, ranks=devices)
    assert done.returncode != 0, "the save was not killed"
    assert (folder / "first.ckpt").is_dir(), done.stderr[-4000:]


def content(checkpoint: Path) -> dict[str, bytes]:
    """Return every file of a checkpoint except those of an unfinished save."""
    files = (file for file in checkpoint.rglob("*") if file.is_file())
    return {
        name: file.read_bytes()
        for file in files
        if not (name := str(file.relative_to(checkpoint))).startswith(".saving")
    }


@pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain")
@pytest.mark.parametrize(("devices", "when"), long_but([(2, "writing")], [(1, "removing"), (2, "writing")]))
def test_a_killed_save_leaves_a_whole_checkpoint(devices: int, when: str, tmp_path: Path, attack: Attack) -> None:
    """A kill during writing leaves the old checkpoint byte for byte.

    A kill after the swap leaves the new one, which resumes.
    """
    attack("kill within a save of a training, 1 and 2 processes", tries=1, outcome="the old or the new one is whole")
    killed(tmp_path, devices, when)
    path = tmp_path / "last.ckpt"
    if when != "removing":
        assert content(path) == content(tmp_path / "first.ckpt")
        return
    assert content(path) != content(tmp_path / "first.ckpt")
    run = partial(Run, recipe=RECIPE, transfer=TRANSFER, options={"compression": CODEC})
    straight, _, _ = train(run(out=str(tmp_path / "straight")))
    resumed, _, _ = train(run(out=str(tmp_path / "resumed"), resume=str(path), save_after_fit=str(path)))
    assert resumed.losses == straight.losses[2:]
    assert not (path / ".saving").exists()
