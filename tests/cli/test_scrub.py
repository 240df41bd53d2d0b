"""The command ``smart-infinity scrub``."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.storage import recover_store

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.common import progress
from lightning_smartinfinity.zero3.checkpoints.formats.optimizer_state import EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import RANK_KEY, SAVE_ID
from tests.cli.test_jobs import damage, left, refusing
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit_behind
from tests.helpers.universal import convert, convert_by_command, save_of_two
from tests.storage.makers import commit_generation, create, created

SHAPES = [{"a": torch.Size([5000])}]
WHOLE = {"a": torch.arange(5000.0)}


def checkpoint(tmp_path: Path) -> Path:
    return save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, {"sum": 1})


def test_state_over_two_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state is read over all its folders, with status 0 if it is whole and 1 if not."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders, world_size=1)
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


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has the sentences, whatever was found, and the status is the same."""
    path = left(tmp_path)
    assert main(["scrub", str(tmp_path), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"damaged": [], "unknown": []}
    assert main(["scrub", str(tmp_path), "--job", "mine", "--quiet", "--json"]) == 2
    assert "'mine'" in json.loads(capsys.readouterr().out)["unknown"][0]
    damage(path)
    assert main(["scrub", str(tmp_path), "--quiet", "--json"]) == 1
    assert str(path) in json.loads(capsys.readouterr().out)["damaged"][0]


def test_a_commit_record_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was torn or damaged: that is told with status 2, and the state that is left is read all the same."""
    store = create([tmp_path], world_size=1)
    for generation in range(3):
        commit_generation(store, generation)
    store.close(remove=False)
    flip_bit_behind(b"LSICMT01", tmp_path / "default/rank-00000/commit.bin")
    assert main(["scrub", str(tmp_path), "--quiet"]) == 2
    said = capsys.readouterr()
    assert "torn by a power loss or damaged since. Generation 1 was read." in said.err
    assert "5 extents of generation 1 read" in said.out and "Whole" not in said.out
    assert main(["jobs", str(tmp_path), "--verify", "--quiet"]) == 1
    said = capsys.readouterr()
    assert "incomplete" in said.out and "torn by a power loss or damaged since" in said.out


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


def test_nothing_that_was_not_read_is_called_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of which a rank's folder is missing has status 2."""
    store = create([tmp_path], rank=1, world_size=4)
    commit_generation(store, 0)
    store.close(remove=False)
    assert main(["scrub", str(tmp_path), "--quiet"]) == 2
    said = capsys.readouterr()
    assert "3 of 4 ranks (0, 2, 3) is missing" in said.err and "Whole" not in said.out


@pytest.mark.parametrize("in_use", [0, 1])
def test_damage_is_told_beside_a_rank_that_cannot_be_read(
    tmp_path: Path, in_use: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank is damaged, the other in use: the damage is printed, with status 1."""
    for rank in range(2):
        store = create([tmp_path], rank=rank)
        commit_generation(store, 0)
        store.close(remove=False)
    damage(tmp_path / f"default/rank-0000{1 - in_use}/state.bin")
    store = recover_store([tmp_path], rank=in_use)
    assert main(["scrub", str(tmp_path), "--quiet"]) == 1
    store.close(remove=False)
    said = capsys.readouterr()
    assert said.out.endswith("1 damaged.\n") and "in use by process" in said.err


def test_beside_folders_that_cannot_be_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job is told apart from another user's beside it, and the folder above a job or checkpoint need not be read."""
    left(tmp_path / "above")
    path = checkpoint(tmp_path / "above")
    (tmp_path / "above/secret").mkdir()
    monkeypatch.setattr(os, "listdir", refusing({"secret"}))
    assert main(["scrub", str(tmp_path / "above"), "--quiet"]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert main(["scrub", str(tmp_path / "above"), "--job", "default", "--quiet"]) == 0
    monkeypatch.setattr(os, "scandir", refusing_above(tmp_path / "above"))
    assert main(["scrub", str(tmp_path / "above/default"), "--quiet"]) == 0
    assert main(["scrub", str(path), "--quiet"]) == 0


def refusing_above(folder: Path) -> Any:
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if Path(str(path)) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    return scandir


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
    assert f"has no file {file}." in capsys.readouterr().out


@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_checkpoint_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, universal: bool, number: int
) -> None:
    """Files that another user's checkpoint keeps from this one are not called damaged: the status is 2."""
    path = checkpoint(tmp_path)
    path = convert_by_command(path, tmp_path / "universal") if universal else path
    capsys.readouterr()
    files = sorted(path.rglob("*.pt"))
    files += [] if universal else [path / "latest"]
    for file in files:
        with monkeypatch.context() as patched:
            patched.setattr(io, "open", refusing_to_open(file, number))
            assert main(["scrub", str(path), "--quiet"]) == 2
        said = capsys.readouterr()
        assert str(file) in said.err and os.strerror(number) in said.err and "permission" in said.err
        assert "amaged" not in said.out and "Whole" not in said.out


def test_damage_is_told_beside_a_file_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is 1, and the command names the damaged file and the unreadable one."""
    path = checkpoint(tmp_path)
    secret, damaged = sorted(path.rglob("*.pt"))[:2]
    before = damaged.read_bytes()
    flip_bit_behind(before[: len(before) // 2], damaged)
    monkeypatch.setattr(io, "open", refusing_to_open(secret, errno.EACCES))
    assert main(["scrub", str(path), "--quiet"]) == 1
    said = capsys.readouterr()
    assert str(damaged) in said.out and str(secret) not in said.out and f"{secret} cannot be read" in said.err


def test_a_folder_of_a_checkpoint_that_may_not_be_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in a folder that this user may not list are not called missing."""
    path = convert_by_command(checkpoint(tmp_path), tmp_path / "universal")
    capsys.readouterr()
    monkeypatch.setattr(os, "scandir", refusing_above(path / "zero/a"))
    assert main(["scrub", str(path), "--quiet"]) == 2
    said = capsys.readouterr()
    assert (
        str(path / "zero/a") in said.err
        and "Give this user permission" in said.err
        and said.out.endswith("files read\n")
    )


def refusing_to_open(file: Path, number: int) -> Callable[..., Any]:
    """Return an ``io.open`` that may not open a file: the user of a test may be root, who may open all."""
    real = io.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int) and Path(path) == file:
            raise PermissionError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    return opened


def rewrite(file: Path, change: Callable[[Any], object]) -> None:
    content = torch.load(file)
    change(content)
    torch.save(content, file)


def named_save(tmp_path: Path) -> Path:
    """Return a checkpoint of two processes whose files name their save, as ours do."""
    path = checkpoint(tmp_path)
    for file in path.rglob("*model_states.pt"):
        named = {SAVE_ID: "this", RANK_KEY: int("rank_1_" in file.name)}
        rewrite(file, lambda states, named=named: states.update(named))
    for file in path.rglob("*optim_states.pt"):
        extra = {"save_id": "this", "rank": int("rank_1_" in file.name), "weights_only": False}
        rewrite(file, lambda states, extra=extra: states["optimizer_state_dict"].update({EXTRA_KEY: extra}))
    return path


def remove_rank_1(path: Path) -> None:
    for file in path.rglob("*rank_1_*.pt"):
        file.unlink()


def remove_model_states(path: Path) -> None:
    for file in path.rglob("*model_states.pt"):
        file.unlink()


def of_another_save(path: Path) -> None:
    def change(states: Any) -> None:
        states["optimizer_state_dict"][EXTRA_KEY]["save_id"] = "another"

    rewrite(next(path.rglob("*rank_1_*optim_states.pt")), change)


def of_another_model_state(path: Path) -> None:
    rewrite(next(path.rglob("*rank_1_*model_states.pt")), lambda states: states.update({SAVE_ID: "another"}))


def optimizer_of_another_save(path: Path) -> None:
    rewrite(path / "zero/optimizer_state.pt", lambda states: states[EXTRA_KEY].update(save_id="another"))


def rank_1_by_another_name(path: Path, kind: str) -> None:
    file = next(path.rglob(f"*rank_1_*{kind}_states.pt"))
    shutil.copy(file, file.with_name(file.name.replace("rank_1_mp", "rank_0_mp")))


def rank_above_all(path: Path) -> None:
    file = next(path.rglob("*rank_1_*optim_states.pt"))
    shutil.copy(file, file.with_name(file.name.replace("rank_1_mp", f"rank_{10**12}_mp")))


INCOMPLETE: dict[str, tuple[bool, Callable[[Path], object], str]] = {
    "no files of a rank": (False, remove_rank_1, "holds the model states of 1 processes; 2 saved"),
    "no optimizer state of a rank": (
        False,
        lambda path: next(path.rglob("*rank_1_*optim*")).unlink(),
        "The optim states of rank 1 are missing",
    ),
    "no model states": (False, remove_model_states, r"has no file .*rank_0_.*model_states\.pt"),
    "no latest": (False, lambda path: (path / "latest").unlink(), "has no file 'latest'"),
    "optimizer state of another save": (False, of_another_save, "come from different saves"),
    "model states of another save": (False, of_another_model_state, "come from different saves"),
    "optimizer state of another rank": (False, partial(rank_1_by_another_name, kind="optim"), "was saved by rank 1"),
    "model states of another rank": (False, partial(rank_1_by_another_name, kind="model"), "was saved by rank 1"),
    "a rank above all others": (False, rank_above_all, "The optim states of 999999999990 further ranks are missing"),
    "no files of a rank, universal": (True, remove_rank_1, "holds the model states of 1 processes; 2 saved"),
    "no checksums": (True, lambda path: (path / "zero/crc32c.pt").unlink(), r"has no file .*zero/crc32c\.pt"),
    "no parameter": (True, lambda path: shutil.rmtree(path / "zero/a"), r"has no file .*zero/a/fp32\.pt"),
    "no optimizer state": (True, lambda path: (path / "zero/optimizer_state.pt").unlink(), r"optimizer_state\.pt"),
    "optimizer state of another save, universal": (True, optimizer_of_another_save, "come from different saves"),
    "model states of another save, universal": (True, of_another_model_state, "come from different saves"),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_files_that_are_no_checkpoint_together(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], attack: Attack
) -> None:
    """Each file is whole by itself, but a training could not resume from them: that is damage."""
    universal, damage, said = INCOMPLETE[name]
    path = named_save(tmp_path)
    path = convert_by_command(path, tmp_path / "universal") if universal else path
    assert main(["scrub", str(path), "--quiet"]) == 0
    damage(path)
    capsys.readouterr()
    assert main(["scrub", str(path), "--quiet"]) == 1
    assert re.search(said, capsys.readouterr().out)
    attack("file of a checkpoint lost, or of another save, before a scrub", tries=1, outcome="the scrub tells it")


def test_a_universal_checkpoint_of_another_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's own universal folders have no checksums of blocks, and are whole without."""
    path = convert(save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, {"exp_avg": 1, "exp_avg_sq": 2}))
    assert not (path / "zero/crc32c.pt").exists()
    assert main(["scrub", str(path), "--quiet"]) == 0
    capsys.readouterr()


def test_types_that_need_consent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scrub runs nothing that a file names, so it cannot tell whether the files belong together without consent."""
    path = checkpoint(tmp_path)
    rewrite(next(path.rglob("*rank_1_*model_states.pt")), lambda states: states.update(of_user=LossScaler(1)))
    assert main(["scrub", str(path), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "LossScaler" in said and "--no-weights-only" in said
    assert main(["scrub", str(path), "--no-weights-only", "--quiet"]) == 0
