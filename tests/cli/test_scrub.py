"""The command ``smart-infinity scrub``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import progress
from lightning_smartinfinity.cli import main
from tests.cli.test_jobs import damage, left
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit_behind
from tests.helpers.universal import convert_by_command, save_of_two
from tests.store.makers import commit_generation, create, created

SHAPES = [{"a": torch.Size([5000])}]
WHOLE = {"a": torch.arange(5000.0)}


def checkpoint(tmp_path: Path) -> Path:
    return save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, {"sum": 1})


def test_state_over_two_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state is read over all its folders, with status 0 if it is whole and 1 if not."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders)
    commit_generation(store, 0)
    store.close(remove=False)
    names = [str(folder) for folder in folders]
    assert main(["scrub", *names, "--quiet"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("Whole.\n") and "5 extents of generation 0 read" in said
    damage(Path(store.files[1].path))
    assert main(["scrub", *names, "--quiet"]) == 1
    said = capsys.readouterr().out
    assert said.endswith("1 damaged.\n") and store.files[1].path in said


@pytest.mark.parametrize("below", ["", "default", "default/rank-00000"])
def test_the_folder_of_a_job_or_rank(tmp_path: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The path may be that of the storage folder, of the job or of a rank."""
    left(tmp_path)
    assert main(["scrub", str(tmp_path / below), "--quiet"]) == 0
    assert "Whole." in capsys.readouterr().out


def test_what_cannot_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State in use, another job and a folder of something else have status 2."""
    with created([tmp_path]):
        assert main(["scrub", str(tmp_path), "--quiet"]) == 2
        assert "in use by process" in capsys.readouterr().err
    assert main(["scrub", str(tmp_path), "--job", "mine"]) == 2
    assert "'mine'" in capsys.readouterr().err
    assert main(["scrub", str(tmp_path / "nowhere")]) == 2
    assert main(["scrub", str(tmp_path)]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["scrub"])
    assert caught.value.code == 2


def test_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    """Every file of a checkpoint is read with progress, and a damaged or missing one is named."""
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    path = checkpoint(tmp_path)
    assert main(["scrub", str(path)]) == 0
    said = capsys.readouterr()
    assert "Whole." in said.out and "100%" in said.err
    files = sorted(path.rglob("*.pt"))
    for file in files:
        before = file.read_bytes()
        flip_bit_behind(before[: len(before) // 2], file)
        assert main(["scrub", str(path), "--quiet"]) == 1
        assert str(file) in capsys.readouterr().out
        file.write_bytes(before)
    first = next(file for file in files if "rank_0" in file.name and "optim" in file.name)
    first.unlink()
    assert main(["scrub", str(path), "--quiet"]) == 1
    assert "optim states of rank 0 are missing" in capsys.readouterr().out
    attack("bit flip in a checkpoint, before a scrub", tries=len(files), outcome="the scrub names the file")


def test_a_universal_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arrays are compared with the checksums of their blocks as well, and a missing array is named."""
    path = convert_by_command(checkpoint(tmp_path), tmp_path / "universal")
    assert main(["scrub", str(path), "--quiet"]) == 0
    capsys.readouterr()
    file = path / "zero/a/sum.pt"
    torch.save(WHOLE["a"], file)  # whole by itself, but not what was converted
    assert main(["scrub", str(path), "--quiet"]) == 1
    assert f"{file} is damaged: the checksum of a block" in capsys.readouterr().out
    file.unlink()
    assert main(["scrub", str(path), "--quiet"]) == 1
    assert f"{file} is missing." in capsys.readouterr().out
