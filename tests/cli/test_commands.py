"""The commands ``jobs``, ``scrub``, ``convert`` and ``universal``, help, and output that cannot be written."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from lightning_smartinfinity import CheckpointError, ConfigError, TransferConfig
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.output import checked_output
from lightning_smartinfinity.common import progress
from lightning_smartinfinity.resume.record_content import (
    _ENGINE_KEYS,
    TRAINER_KEYS,
    TRANSFORMERS_KEYS,
    content_of,
)
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.jobs import jobs
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.format_version import EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import RANK_KEY, SAVE_ID
from tests.cli.conftest import Cli
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit_behind
from tests.helpers.universal import convert, convert_by_command, save_of_two
from tests.native.builds import run_python
from tests.pipeline.harness import Case
from tests.pipeline.test_convert import kept
from tests.storage.makers import created, left, tree


def refusing_to(call: Callable[..., Any], *paths: Path, number: int = errno.EACCES) -> Callable[..., Any]:
    """Return a function that may not open or list some paths: the user of a test may be root, who may do all."""

    def refusing(asked: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(asked, int) and Path(str(asked)) in paths:
            raise PermissionError(number, os.strerror(number), str(asked))
        return call(asked, *args, **kwargs)

    return refusing


def damage(rank_folder: Path, at: int = 0) -> None:
    with (rank_folder / "state.bin").open("r+b") as file:
        file.seek(at)
        file.write(b"damaged")


def test_the_table(tmp_path: Path, cli: Cli) -> None:
    """Each job is a line: its folder, its process, size, age and generation."""
    left(tmp_path, world_size=1, job="dead", keep=True)
    with created([tmp_path], job="live"):
        head, dead, live = cli("jobs", tmp_path).out.splitlines()
    assert head.split() == ["job", "process", "size", "written", "generation"]
    assert dead.split() == [str(tmp_path / "dead"), "dead", *dead.split()[2:4], "0", "s", "ago", "0", "kept"]
    assert live.split()[1:3] == ["alive", str(os.getpid())] and live.split()[-1] == "-1"


def test_ranks_without_a_record_in_common(tmp_path: Path, cli: Cli) -> None:
    """No step is promised: one rank's newest record is damaged, and the other rank's next step is in flight.

    Nor is one where a file is refused, since it has another name.
    """
    recorded(tmp_path)
    os.link(tmp_path / "default/rank-00000/state.bin", tmp_path / "other")
    refused = cli("jobs", tmp_path).out
    assert "unreadable" in refused and "2 hard links" in refused and "resumable" not in refused
    (tmp_path / "other").unlink()
    assert "resumable, step 2" in cli("jobs", tmp_path).out
    in_flight = recover_store([tmp_path], rank=1, training=2)
    in_flight.record_training(generation=2, step=3, content=b"", has_steps=True)
    in_flight.close(remove=False)
    assert "resumable, step 2" in cli("jobs", tmp_path).out
    flip_bit_behind(bytes(16), tmp_path / "default/rank-00000/training-0.bin")
    said = cli("jobs", tmp_path, "--verify", "--quiet", status=1).out
    assert "resumable" not in said and "goes on from" not in said and "no training record in common" in said


def test_damage_to_the_step_that_all_ranks_have(tmp_path: Path, cli: Cli) -> None:
    """One rank was killed before it committed the second step: of the other, the state of the first is verified."""
    recorded(tmp_path, steps=(2, 1))
    assert "tasklet" not in cli("jobs", tmp_path, "--verify", "--quiet", status=1).out  # its records have no content
    store = recover_store([tmp_path], rank=0, training=2)
    place = int(store.next_placement().positions[1])  # where the first step's state is
    store.close(remove=False)
    damage(tmp_path / "default/rank-00000", store.extents.place_offset(place))
    said = cli("jobs", tmp_path, "--verify", "--quiet", status=1).out
    assert "resumable, step 1" in said and said.count("rank-00000/state.bin") == 1 and "tasklet 1 " in said


def recorded(storage: Path, steps: tuple[int, int] = (2, 2)) -> None:
    """Leave the stores of two ranks with a record of each step."""
    job_id = os.urandom(16)
    for rank, generations in enumerate(steps):
        left(storage, generations=generations, steps=range(1, 1 + generations), rank=rank, job_id=job_id)


@pytest.mark.parametrize(
    ("keys", "job", "call"),
    [
        (TRAINER_KEYS, "default", "ckpt_path={!r}"),
        (TRANSFORMERS_KEYS, "out-1", "resume_from_checkpoint={!r}"),
        ({"of a loop"}, "mine", "fabric.load({!r}, state)"),
        (None, "default", "{!r}"),  # a record that cannot be read
    ],
)
def test_a_storage_folder_is_lost(keys: Collection[str] | None, job: str, call: str, tmp_path: Path, cli: Cli) -> None:
    """Both commands name it, and how to go on from the newest checkpoint, with the calls of its kind of training.

    What is there is not called damaged. While a process uses the state, there is no step to resume after.
    """
    a, b, c = folders = [tmp_path / name for name in "abc"]
    content = b"" if keys is None else content_of(dict.fromkeys(_ENGINE_KEYS), dict.fromkeys(keys))
    left(*folders, steps=[7], world_size=1, job=job, content=content)
    store = recover_store(folders, job=job, training=1)
    for step in (5, 7):
        (tmp_path / f"step {step}.ckpt").mkdir()
        store.note_checkpoint(str(tmp_path / f"step {step}.ckpt"), step=step)
    assert "resumable" not in cli("jobs", *folders).out
    store.close(remove=False)
    assert cli("jobs", *folders).out.splitlines()[1].endswith(" 0  resumable, step 7")
    assert json.loads(cli("jobs", *folders, "--json").out)[0]["resumable_step"] == 7
    b.rename(tmp_path / "unmounted")
    told = f"'{b}' lacks its part. Mount '{b}'. If it is lost, go on from the newest checkpoint, after step 7: "
    told += f"{call.format(f'{tmp_path}/step 7.ckpt')}, with the other folders: storage=['{a}', '{c}']"
    told += "." if job == "default" else f" and transfer={{'job': '{job}'}}."
    for named, status in (([a, c], 0), (folders, 1)):
        said = cli("jobs", *named, status=status)
        assert said.out.count(told) == 1 and said.out.count("incomplete") == 2, said.out
        assert "resumable" not in said.out and (f"'{b}'" in said.err) == bool(status)
        said = cli("scrub", *named, status=2)
        assert said.err.count(told) == 1 and "amaged" not in said.out + said.err and "Whole" not in said.out
    (found, _) = json.loads(cli("jobs", a, c, "--json").out)
    assert found["resumable_step"] is None and found["folders"][0]["checkpoint"] == str(tmp_path / "step 7.ckpt")
    (tmp_path / "step 7.ckpt").rmdir()
    assert "from a checkpoint (the newest, " in cli("jobs", a, c).out
    (tmp_path / "unmounted").rename(b)
    assert "resumable, step 7" in cli("jobs", a, c).out


def test_no_jobs(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the Trainer's folder, and a folder without jobs is said to have none."""
    monkeypatch.chdir(tmp_path)
    said = cli("jobs", status=1).err
    assert f"no folder 'smart_infinity' here, in {str(tmp_path)!r}" in said and "jobs FOLDER..." in said
    (tmp_path / "smart_infinity").mkdir()
    assert cli("jobs").out == "There are no jobs in smart_infinity.\n"


def test_verify(tmp_path: Path, cli: Cli) -> None:
    """Each ended job is read and reported as whole or damaged, also in JSON; one damaged job makes the exit status 1.

    With --job only that job is read.
    """
    left(tmp_path, world_size=1, job="whole")
    assert "whole" in cli("jobs", tmp_path, "--verify", "--quiet").out.splitlines()[1].split()
    damage(left(tmp_path, world_size=1, job="damaged"))
    with created([tmp_path], job="live"):
        said = cli("jobs", tmp_path, "--verify", "--quiet", status=1).out
    _, damaged, live, whole, sentence = said.splitlines()
    assert [line.split()[-1] for line in (damaged, live, whole)] == ["damaged", "-1", "whole"]
    assert "tasklet 0 at offset 0" in sentence and str(tmp_path / "damaged") in sentence
    (_, line) = cli("jobs", tmp_path, "--job", "whole", "--verify", "--quiet").out.splitlines()
    assert line.startswith(str(tmp_path / "whole")) and line.endswith("whole")
    (job,) = json.loads(cli("jobs", tmp_path, "--job", "whole", "--json", "--verify", "--quiet").out)
    expected = {"job": "whole", "storage": str(tmp_path), "generation": 0, "damaged": []}
    assert job == job | expected and job["folders"][0]["path"] == str(tmp_path / "whole/rank-00000")


def test_verify_of_what_cannot_be_read(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is absent and a folder that cannot be listed are not called whole."""
    left(tmp_path, world_size=2, job="half")
    closed = [tmp_path / name for name in ("secret", "lost+found")]
    for folder in closed:
        folder.mkdir()
    monkeypatch.setattr(os, "listdir", refusing_to(os.listdir, *closed))
    _, half, secret, denied, absent = cli("jobs", tmp_path, "--verify", "--quiet", status=1).out.splitlines()
    assert half.endswith(" incomplete") and secret.split()[1] == "unknown" and secret.endswith(" unreadable")
    assert "secret': Permission denied" in denied and "1 of 2 ranks (1) is missing" in absent
    assert "Only the user who owns the folder" in cli("jobs", tmp_path, "--remove", "secret", status=1).err


def test_remove(tmp_path: Path, cli: Cli) -> None:
    """A dead job is removed; one that is in use, kept or unknown is refused with a remedy, and stays."""
    left(tmp_path, world_size=1)
    left(tmp_path, world_size=1, job="kept", keep=True)
    with created([tmp_path], job="live"):
        before = tree(tmp_path)
        for name, said in [("live", f"process {os.getpid()}"), ("kept", "--kept"), ("unknown", "no job 'unknown'")]:
            assert said in cli("jobs", tmp_path, "--remove", name, status=1).err and tree(tmp_path) == before
    recorded(tmp_path / "two")
    theirs = tmp_path / "two/default/rank-00000/training-1.bin"
    theirs.unlink()
    theirs.mkdir()
    _, *told = cli("jobs", tmp_path / "two", "--remove", "default").out.splitlines()
    assert told == [f"{theirs.parent} stays: it holds files that this package did not make"]
    assert tree(theirs.parents[1]) == {"rank-00000", "rank-00000/training-1.bin"}
    theirs.rmdir()
    cli("jobs", tmp_path / "two", "--remove", "default")
    (tmp_path / "two").rmdir()
    removing = ["--remove", "default", "--remove", "kept", "--kept"]
    assert cli("jobs", tmp_path, tmp_path, *removing).out.count("Removed ") == 2  # a folder that is named twice, once
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("name", ["\x1b[2Jx\nfake", "\udcff", "lost+found"], ids=["control", "no text", "lost+found"])
def test_folders_with_names_of_no_job(tmp_path: Path, cli: Cli, name: str) -> None:
    """Folders whose names no job may have are not listed, so that no name forges a line, and no job has such a name."""
    left(tmp_path, world_size=1).parent.rename(tmp_path / name)
    assert cli("jobs", tmp_path).out == f"There are no jobs in {tmp_path}.\n"
    with pytest.raises(ConfigError, match="not a name for a job's folder"):
        TransferConfig(job=name)


def test_records_of_another_user_are_not_read(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest may say that they are larger than this machine's memory."""
    left(tmp_path, world_size=1)
    monkeypatch.setattr(os, "geteuid", mock.Mock(return_value=os.geteuid() + 1))
    monkeypatch.setattr(jobs, "records_of", None)
    (listed,) = json.loads(cli("jobs", tmp_path, "--json").out)
    assert (listed["generation"], listed["folders"][0]["rank"]) == (None, 0)


def test_more_ranks_than_can_be_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest's number of ranks takes neither memory nor time."""
    job = jobs.find_job(tmp_path, left(tmp_path, world_size=1).parent.name)
    absent = jobs.absent_state([replace(job, folders=(replace(job.folders[0], world_size=1 << 62),))])
    assert absent is not None and f"{(1 << 62) - 1} of {1 << 62} ranks (1, 2, 3, 4, 5, 6, 7, 8, ...)" in absent


# ---- the command scrub


SHAPES = [{"a": torch.Size([5000])}]
WHOLE = {"a": torch.arange(5000.0)}


def checkpoint(tmp_path: Path) -> Path:
    return save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, {"sum": 1})


def test_state_over_two_folders(tmp_path: Path, cli: Cli) -> None:
    """The state is read over all its folders, with status 0 if it is whole and 1 if not; JSON has the sentences.

    The command ``jobs`` tells damage for the job in both folders, once.
    """
    folders = [tmp_path / "a", tmp_path / "b"]
    left(*folders, world_size=1)
    second = folders[1] / "default/rank-00000"
    said = cli("scrub", *folders, "--quiet").out
    assert said.endswith("Whole.\n") and "5 extents of generation 0 read" in said
    assert json.loads(cli("scrub", *folders, "--quiet", "--json").out) == {"damaged": [], "unknown": []}
    assert cli("jobs", *folders, "--verify", "--quiet").out.count("whole") == 2
    said = cli("jobs", folders[1], "--verify", "--quiet", status=1).out
    assert "storage folders are in another order" in said and "damaged" not in said
    found = json.loads(cli("scrub", *folders, "--job", "mine", "--quiet", "--json", status=2).out)
    assert "'mine'" in found["unknown"][0]
    shutil.copytree(folders[1], tmp_path / "c")
    assert f"{folders[1]}': one of them is a copy" in cli("scrub", *folders, tmp_path / "c", "--quiet", status=2).err
    damage(second)
    said = cli("scrub", *folders, "--quiet", status=1).out
    assert said.endswith("1 damaged.\n") and f"{second}/state.bin" in said
    found = json.loads(cli("scrub", *folders, "--quiet", "--json", status=1).out)
    assert f"{second}/state.bin" in found["damaged"][0]
    _, *lines, sentence = cli("jobs", *folders, "--verify", "--quiet", status=1).out.splitlines()
    assert [line.split()[-1] for line in lines] == ["damaged"] * 2 and f"{second}/state.bin" in sentence


def test_a_commit_record_that_cannot_be_read(tmp_path: Path, cli: Cli) -> None:
    """It was torn or damaged: that is told with status 2, and the state that is left is read all the same."""
    flip_bit_behind(b"LSICMT01", left(tmp_path, generations=3, world_size=1) / "commit.bin")
    out, err = cli("scrub", tmp_path, "--quiet", status=2)
    assert "torn by a power loss or damaged since. Generation 1 was read." in err
    assert "5 extents of generation 1 read" in out and "Whole" not in out
    out, _ = cli("jobs", tmp_path, "--verify", "--quiet", status=1)
    assert "incomplete" in out and "torn by a power loss or damaged since" in out


def test_what_cannot_be_told(tmp_path: Path, cli: Cli) -> None:
    """State in use, another job, a folder of something else and a job without a rank's folder have status 2."""
    with created([tmp_path / "s"]):
        assert "in use by process" in cli("scrub", tmp_path / "s", "--quiet", status=2).err
    assert "'mine'" in cli("scrub", tmp_path / "s", "--job", "mine", status=2).err
    cli("scrub", tmp_path / "nowhere", status=2)
    cli("scrub", tmp_path, status=2)
    cli("scrub", status=2)
    left(tmp_path / "part", rank=1, world_size=4)
    said = cli("scrub", tmp_path / "part", "--quiet", status=2)
    assert "3 of 4 ranks (0, 2, 3) is missing" in said.err and "Whole" not in said.out


@pytest.mark.parametrize("in_use", [0, 1])
def test_damage_is_told_beside_a_rank_that_cannot_be_read(tmp_path: Path, in_use: int, cli: Cli) -> None:
    """One rank is damaged, the other in use: the damage is printed, with status 1."""
    ranks = [left(tmp_path, rank=rank) for rank in range(2)]
    damage(ranks[1 - in_use])
    store = recover_store([tmp_path], rank=in_use)
    said = cli("scrub", tmp_path, "--quiet", status=1)
    store.close(remove=False)
    assert said.out.endswith("1 damaged.\n") and "in use by process" in said.err


def test_beside_folders_that_cannot_be_listed(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is told apart from another user's beside it, and the folder above a job or checkpoint need not be read."""
    left(tmp_path / "above", world_size=1)
    path = checkpoint(tmp_path / "above")
    secret = tmp_path / "above/secret"
    secret.mkdir()
    for below in ("default", "default/rank-00000"):  # the path may be that of a job or of a rank
        assert "Whole." in cli("scrub", tmp_path / "above" / below, "--quiet").out
    monkeypatch.setattr(os, "listdir", refusing_to(os.listdir, secret))
    assert "Permission denied" in cli("scrub", tmp_path / "above", "--quiet", status=2).err
    cli("scrub", tmp_path / "above", "--job", "default", "--quiet")
    monkeypatch.setattr(os, "scandir", refusing_to(os.scandir, tmp_path / "above"))
    for each in (tmp_path / "above/default", path):
        cli("scrub", each, "--quiet")


def test_a_checkpoint(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, attack: Attack) -> None:
    """Every file of a checkpoint is read with progress, and a damaged or missing one is named."""
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    path = checkpoint(tmp_path)
    said = cli("scrub", path)
    assert "Whole." in said.out and "100%" in said.err
    files = sorted(path.rglob("*.pt"))
    for file in files:
        before = file.read_bytes()
        flip_bit_behind(before[: len(before) // 2], file)
        assert str(file) in cli("scrub", path, "--quiet", status=1).out
        file.write_bytes(before)
    next(file for file in files if "rank_0" in file.name and "optim" in file.name).unlink()
    assert "optim states of rank 0 are missing" in cli("scrub", path, "--quiet", status=1).out
    attack("bit flip in a checkpoint, before a scrub", tries=len(files), outcome="the scrub names the file")


def test_a_universal_checkpoint(tmp_path: Path, cli: Cli) -> None:
    """Arrays are compared with the checksums of their blocks as well, and a missing array is named."""
    path = convert_by_command(checkpoint(tmp_path), tmp_path / "universal")
    cli("scrub", path, "--quiet")
    file = path / "zero/a/sum.pt"
    torch.save(WHOLE["a"], file)  # whole by itself, but not what was converted
    assert f"{file} is damaged: the checksum of a block" in cli("scrub", path, "--quiet", status=1).out
    file.unlink()
    assert f"has no file {file}." in cli("scrub", path, "--quiet", status=1).out


@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_checkpoint_that_may_not_be_read(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, universal: bool, number: int
) -> None:
    """Files that another user's checkpoint keeps from this one are not called damaged: the status is 2.

    Nor are files in a folder that this user may not list called missing.
    """
    path = checkpoint(tmp_path)
    path = convert_by_command(path, tmp_path / "universal") if universal else path
    for file in sorted(path.rglob("*.pt")) + ([] if universal else [path / "latest"]):
        with monkeypatch.context() as patched:
            patched.setattr(io, "open", refusing_to(io.open, file, number=number))
            said = cli("scrub", path, "--quiet", status=2)
        assert str(file) in said.err and os.strerror(number) in said.err and "permission" in said.err
        assert "amaged" not in said.out and "Whole" not in said.out
    if universal:
        monkeypatch.setattr(os, "scandir", refusing_to(os.scandir, path / "zero/a", number=number))
        said = cli("scrub", path, "--quiet", status=2)
        assert str(path / "zero/a") in said.err and "Give this user permission" in said.err
        assert said.out.endswith("files read\n")
        with pytest.raises(CheckpointError, match=r"zero/a.* Give this user permission"), reading_checkpoint(path):
            os.scandir(path / "zero/a")


Change = Callable[[Path], object]


def to_files(pattern: str, change: Change) -> Change:
    """Return a function that changes the files of a checkpoint that have such names."""
    return lambda path: [change(file) for file in [*path.rglob(pattern)]]


def rewrite(pattern: str, change: Callable[[Any, int], object]) -> Change:
    """Return a function that changes what files of a checkpoint hold; the change gets content and rank."""

    def changing(file: Path) -> None:
        content = torch.load(file)
        change(content, int("rank_1_" in file.name))
        torch.save(content, file)

    return to_files(pattern, changing)


remove = partial(to_files, change=Path.unlink)


def copy(pattern: str, other_rank: int) -> Change:
    """Return a function that copies a file of rank 1 to the name of another rank's."""
    other = f"rank_{other_rank}_mp"
    return to_files(pattern, lambda file: shutil.copy(file, file.with_name(file.name.replace("rank_1_mp", other))))


OTHER_MODEL = rewrite("*rank_1_*model_states.pt", lambda states, _: states.update({SAVE_ID: "another"}))
INCOMPLETE: dict[str, tuple[bool, Change, str]] = {
    "no files of a rank": (False, remove("*rank_1_*.pt"), "holds the model states of 1 processes; 2 saved"),
    "no optimizer state of a rank": (False, remove("*rank_1_*optim*"), "The optim states of rank 1 are missing"),
    "no model states": (False, remove("*model_states.pt"), r"has no file .*rank_0_.*model_states\.pt"),
    "no latest": (False, remove("latest"), "has no file 'latest'"),
    "optimizer state of another save": (
        False,
        rewrite(
            "*rank_1_*optim_states.pt",
            lambda states, _: states["optimizer_state_dict"][EXTRA_KEY].update(save_id="another"),
        ),
        "come from different saves",
    ),
    "model states of another save": (False, OTHER_MODEL, "come from different saves"),
    "optimizer state of another rank": (False, copy("*rank_1_*optim_states.pt", 0), "was saved by rank 1"),
    "model states of another rank": (False, copy("*rank_1_*model_states.pt", 0), "was saved by rank 1"),
    "a rank above all others": (
        False,
        copy("*rank_1_*optim_states.pt", 10**12),
        "The optim states of 999999999990 further ranks are missing",
    ),
    "no files of a rank, universal": (True, remove("*rank_1_*.pt"), "holds the model states of 1 processes; 2 saved"),
    "no checksums": (True, remove("crc32c.pt"), r"has no file .*zero/crc32c\.pt"),
    "no parameter": (True, lambda path: shutil.rmtree(path / "zero/a"), r"has no file .*zero/a/fp32\.pt"),
    "no optimizer state": (True, remove("optimizer_state.pt"), r"optimizer_state\.pt"),
    "optimizer state of another save, universal": (
        True,
        rewrite("optimizer_state.pt", lambda states, _: states[EXTRA_KEY].update(save_id="another")),
        "come from different saves",
    ),
    "model states of another save, universal": (True, OTHER_MODEL, "come from different saves"),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_files_that_are_no_checkpoint_together(name: str, tmp_path: Path, cli: Cli, attack: Attack) -> None:
    """Each file is whole by itself, but a training could not resume from them: that is damage."""
    universal, damage, said = INCOMPLETE[name]
    path = checkpoint(tmp_path)
    # All files name their save, as ours do.
    rewrite("*model_states.pt", lambda states, rank: states.update({SAVE_ID: "this", RANK_KEY: rank}))(path)
    extra = {"save_id": "this", "weights_only": False}
    rewrite(
        "*optim_states.pt",
        lambda states, rank: states["optimizer_state_dict"].update({EXTRA_KEY: {**extra, "rank": rank}}),
    )(path)
    path = convert_by_command(path, tmp_path / "universal") if universal else path
    cli("scrub", path, "--quiet")
    damage(path)
    assert re.search(said, cli("scrub", path, "--quiet", status=1).out)
    attack("file of a checkpoint lost, or of another save, before a scrub", tries=1, outcome="the scrub tells it")


def test_a_universal_checkpoint_of_another_tool(tmp_path: Path, cli: Cli) -> None:
    """DeepSpeed's own universal folders have no checksums of blocks, and are whole without."""
    path = convert(save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, {"exp_avg": 1, "exp_avg_sq": 2}))
    assert not (path / "zero/crc32c.pt").exists()
    cli("scrub", path, "--quiet")


def test_types_that_need_consent(tmp_path: Path, cli: Cli) -> None:
    """A scrub runs nothing that a file names, so it cannot tell whether the files belong together without consent."""
    path = checkpoint(tmp_path)
    rewrite("*rank_1_*model_states.pt", lambda states, _: states.update(of_user=LossScaler(1)))(path)
    said = cli("scrub", path, "--quiet", status=2).err
    assert "LossScaler" in said and "--no-weights-only" in said
    cli("scrub", path, "--no-weights-only", "--quiet")


# ---- the commands convert and universal, help, and output that cannot be written


def test_converts_and_says_so(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new state has the requested format and is kept. Progress goes to stderr, the result to stdout.

    A size may have its unit.
    """
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    for rank in range(2):
        kept(tmp_path, Case(keep=True, rank=rank))
    convert = ("convert", tmp_path / "disk0", "--into", tmp_path / "new", "--state-format")
    said = cli(*convert, "int8", "--tasklet-bytes", "64KiB")
    assert said.out == f"Converted the state of 2 ranks to int8: {tmp_path / 'new'}\n"
    assert [f"Converting the state of rank {rank}: 100%" in said.err for rank in range(2)] == [True] * 2
    manifest = json.loads((tmp_path / "new/default/rank-00001/manifest.json").read_text())
    assert (manifest["state_format"], manifest["keep"]) == ("int8", True)
    assert cli(*convert, "bf16", "--into", tmp_path / "one", "--rank", "0", "--quiet").err == ""


def test_errors_and_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """The message says what failed and what to do, without a traceback. Ctrl-C ends with a shell's status."""
    convert = ("convert", tmp_path / "disk0", "--into", tmp_path / "new", "--state-format", "bf16")
    said = cli(*convert, status=1).err
    assert said.startswith("smart-infinity: Looking for optimizer state in") and said.count("\n") == 1
    assert "choose another folder" in said
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("lightning_smartinfinity.pipeline.state.convert.convert_store", interrupt)
    assert "interrupted" in cli(*convert, status=130).err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convert", "a"],
        ["convert", "a", "--into", "b", "--state-format", "int2"],
        ["convert", "a", "--into", "s3://bucket/b", "--state-format", "bf16"],
        ["jobs", "a\0b"],
        ["scrub", "a\0b"],
        *(
            [*command.split(), ""]
            for command in ("jobs", "scrub", "convert a --into", "export a", "universal a --into", "selftest")
        ),
    ],
)
def test_what_argparse_refuses(arguments: list[str], cli: Cli) -> None:
    """A missing command or destination, an unknown format, a URL, a null byte or an empty path prints the usage.

    The status is 2.
    """
    said = cli(*arguments, status=2).err
    assert "usage: smart-infinity" in said and ("'' names nothing" in said) == ("" in arguments)


HELP = """
import runpy, sys
sys.argv = ["", "convert", "--help"]
try:
    runpy.run_module("lightning_smartinfinity.cli", run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


def test_help_without_torch() -> None:
    """``python -m lightning_smartinfinity.cli`` is the command, and its help does not import torch."""
    printed = run_python(HELP)
    assert "--state-format {fp32,bf16,int8,int8_remainder}" in printed and printed.endswith("False\n")


def test_parts_of_two_machines(tmp_path: Path, cli: Cli) -> None:
    """The parts in any order make one checkpoint; one twice, or one alone, is refused, and nothing is written."""
    whole = checkpoint(tmp_path / "a")
    part = tmp_path / "b" / "two.ckpt"
    (part / "checkpoint").mkdir(parents=True)
    for file in list((whole / "checkpoint").glob("*zero_pp_rank_1_*")):
        file.rename(part / "checkpoint" / file.name)
    for number, parts in enumerate(([whole, part], [part, whole])):
        into = tmp_path / f"new-{number}"
        said = cli("universal", *parts, "--into", into, "--quiet").out
        assert torch.equal(torch.load(into / "zero/a/sum.pt"), WHOLE["a"] + 1)
        assert f"Converted {parts[0]}, {parts[1]} to a universal checkpoint" in said
    for parts, fault in (([whole], "; 2 saved"), ([whole, whole], "is in .*, too"), ([part, part], "is in .*, too")):
        assert re.search(fault, cli("universal", *parts, "--into", tmp_path / "none", "--quiet", status=1).err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "new-0", "new-1"]


FEW = ["simulate", "--parameters", "1e6", "--devices", "1", "--systems", "zero-infinity"]


def closed() -> io.StringIO:
    with io.StringIO() as stream:
        return stream


def broken_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


OUTPUTS: list[tuple[Callable[[], Any], int, str]] = [
    (partial(open, "/dev/full", "w"), 1, "No space left on device"),
    (partial(open, "/dev/full", "w", buffering=1), 1, "No space left on device"),
    (closed, 1, "Bad file descriptor"),
    (lambda: None, 1, "Bad file descriptor"),
    (broken_pipe, 141, ""),
]


@pytest.mark.parametrize("command", [FEW, [*FEW, "--json"], ["simulate", "--help"], ["selftest"]])
@pytest.mark.parametrize(("output", "status", "reason"), OUTPUTS, ids=["full", "lines", "closed", "none", "pipe"])
def test_output_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    output: Callable[[], Any],
    status: int,
    reason: str,
) -> None:
    """The command says why with status 1, or silently gives a shell's status if the reader is gone."""
    stream = output()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(command) == status and sys.stdout is stream
    if stream is not None and not stream.closed:
        stream.close()
    assert capsys.readouterr().err == (f"smart-infinity: the output cannot be written: {reason}.\n" if reason else "")


def test_an_output_that_cannot_hold_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters that the output's encoding lacks are shown by their numbers."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    with checked_output():
        print("ü")
    assert output.getvalue() == b"\\xfc\n"
