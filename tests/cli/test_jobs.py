"""The command ``smart-infinity jobs``."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_smartinfinity import ConfigError, TransferConfig
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.jobs import jobs
from tests.cli.conftest import Cli
from tests.helpers.damage import flip_bit_behind
from tests.storage.makers import commit_generation, create, created, tree


def left(storage: Path, **config: object) -> Path:
    store = create([storage], world_size=1, **config)
    commit_generation(store, 0)
    store.close(remove=False)
    return Path(store.files[0].path)


def refusing(names: Collection[str]) -> Callable[[int | Path], list[str]]:
    """Return an ``os.listdir`` that may not list these folders: the user of a test may be root, who may list all."""
    real = os.listdir

    def listdir(path: int | Path) -> list[str]:
        if isinstance(path, Path) and path.name in names:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    return listdir


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"damaged")


def test_the_table(tmp_path: Path, cli: Cli) -> None:
    """Each job is a line: its folder, its process, size, age and generation."""
    left(tmp_path, job="dead", keep=True)
    with created([tmp_path], job="live"):
        head, dead, live = cli("jobs", tmp_path).out.splitlines()
    assert head.split() == ["job", "process", "size", "written", "generation"]
    assert dead.split() == [str(tmp_path / "dead"), "dead", *dead.split()[2:4], "0", "s", "ago", "0", "kept"]
    assert live.split()[1:3] == ["alive", str(os.getpid())] and live.split()[-1] == "-1"


def test_a_job_to_resume(tmp_path: Path, cli: Cli) -> None:
    """The remark names the step after which a training goes on; while a process uses the state, there is none."""
    store = create([tmp_path], world_size=1, keep="on-failure")
    commit_generation(store, 0)
    assert "resumable" not in cli("jobs", tmp_path).out
    store.record_training(generation=0, step=7, content=b"", has_steps=True)
    assert "resumable" not in cli("jobs", tmp_path).out
    store.close(remove=False)
    assert cli("jobs", tmp_path).out.rstrip().endswith(" 0  resumable, step 7")
    assert json.loads(cli("jobs", tmp_path, "--json").out)[0]["resumable_step"] == 7


def test_ranks_without_a_record_in_common(tmp_path: Path, cli: Cli) -> None:
    """No step is promised: one rank's newest record is damaged, and the other rank's next step is in flight."""
    recorded(tmp_path)
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
    with (tmp_path / "default/rank-00000/state.bin").open("r+b") as file:
        file.seek(store.extents.place_offset(place))
        file.write(b"damaged")
    said = cli("jobs", tmp_path, "--verify", "--quiet", status=1).out
    assert "resumable, step 1" in said and said.count("rank-00000/state.bin") == 1 and "tasklet 1 " in said


def recorded(storage: Path, steps: tuple[int, int] = (2, 2)) -> None:
    """Leave the stores of two ranks with a record of each step."""
    job_id = os.urandom(16)
    for rank, generations in enumerate(steps):
        store = create([storage], rank=rank, job_id=job_id)
        for generation in range(generations):
            commit_generation(store, generation)
            store.record_training(generation=generation, step=generation + 1, content=b"", has_steps=True)
        store.close(remove=False)


def test_a_storage_folder_is_lost(tmp_path: Path, cli: Cli) -> None:
    """Both commands name it, and how to go on from the newest checkpoint. What is there is not called damaged."""
    a, b, c = folders = [tmp_path / name for name in "abc"]
    store = create(folders, world_size=1)
    commit_generation(store, 0)
    store.record_training(generation=0, step=7, content=b"", has_steps=True)
    for step in (5, 7):
        (tmp_path / f"step {step}.ckpt").mkdir()
        store.note_checkpoint(str(tmp_path / f"step {step}.ckpt"), step=step)
    store.close(remove=False)
    assert "resumable, step 7" in cli("jobs", *folders).out
    b.rename(tmp_path / "unmounted")
    told = f"'{b}' lacks its part. Mount '{b}'. If it is lost, go on from the newest checkpoint, after step 7: "
    told += f"ckpt_path='{tmp_path}/step 7.ckpt', with the other folders: storage=['{a}', '{c}']."
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
    left(tmp_path, job="whole")
    assert "whole" in cli("jobs", tmp_path, "--verify", "--quiet").out.splitlines()[1].split()
    damage(left(tmp_path, job="damaged"))
    with created([tmp_path], job="live"):
        said = cli("jobs", tmp_path, "--verify", "--quiet", status=1).out
    _, damaged, live, whole, sentence = said.splitlines()
    assert damaged.endswith(" damaged") and whole.endswith(" whole") and live.endswith("-1")
    assert "tasklet 0 at offset 0" in sentence and str(tmp_path / "damaged") in sentence
    (_, line) = cli("jobs", tmp_path, "--job", "whole", "--verify", "--quiet").out.splitlines()
    assert line.startswith(str(tmp_path / "whole")) and line.endswith("whole")
    (job,) = json.loads(cli("jobs", tmp_path, "--job", "whole", "--json", "--verify", "--quiet").out)
    assert (job["job"], job["storage"], job["generation"], job["damaged"]) == ("whole", str(tmp_path), 0, [])
    assert job["folders"][0]["path"] == str(tmp_path / "whole/rank-00000")


def test_verify_of_what_cannot_be_read(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is absent and a folder that cannot be listed are not called whole."""
    half_there = create([tmp_path], world_size=2, job="half")
    commit_generation(half_there, 0)
    half_there.close(remove=False)
    (tmp_path / "secret").mkdir()
    (tmp_path / "lost+found").mkdir()
    monkeypatch.setattr(os, "listdir", refusing({"secret", "lost+found"}))
    _, half, secret, *sentences = cli("jobs", tmp_path, "--verify", "--quiet", status=1).out.splitlines()
    assert half.endswith(" incomplete")
    assert secret.split()[1] == "unknown" and secret.endswith(" unreadable")
    assert len(sentences) == 2 and "secret': Permission denied" in sentences[0]
    assert "1 of 2 ranks (1) is missing" in sentences[1]
    assert "Only the user who owns the folder" in cli("jobs", tmp_path, "--remove", "secret", status=1).err


def test_remove(tmp_path: Path, cli: Cli) -> None:
    """A dead job is removed; one that is in use, kept or unknown is refused with a remedy, and stays."""
    left(tmp_path)
    left(tmp_path, job="kept", keep=True)
    with created([tmp_path], job="live"):
        before = tree(tmp_path)
        for name, said in [("live", f"process {os.getpid()}"), ("kept", "--kept"), ("unknown", "no job 'unknown'")]:
            assert said in cli("jobs", tmp_path, "--remove", name, status=1).err
            assert tree(tmp_path) == before
    recorded(tmp_path / "two")
    theirs = tmp_path / "two/default/rank-00000/training-1.bin"
    theirs.unlink()
    theirs.mkdir()
    said = cli("jobs", tmp_path / "two", "--remove", "default").out
    assert said.splitlines()[1:] == [f"{theirs.parent} stays: it holds files that this package did not make"]
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
    left(tmp_path).parents[1].rename(tmp_path / name)
    assert cli("jobs", tmp_path).out == f"There are no jobs in {tmp_path}.\n"
    with pytest.raises(ConfigError, match="not a name for a job's folder"):
        TransferConfig(job=name)


def test_records_of_another_user_are_not_read(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest may say that they are larger than this machine's memory."""
    left(tmp_path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    monkeypatch.setattr(jobs, "records_of", None)
    (listed,) = json.loads(cli("jobs", tmp_path, "--json").out)
    assert listed["generation"] is None and listed["folders"][0]["rank"] == 0


def test_more_ranks_than_can_be_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest's number of ranks takes neither memory nor time."""
    job = jobs.find_job(tmp_path, left(tmp_path).parents[1].name)
    assert job is not None
    folder = replace(job.folders[0], world_size=1 << 62)
    absent = jobs.absent_state([replace(job, folders=(folder,))])
    assert absent is not None and f"{(1 << 62) - 1} of {1 << 62} ranks (1, 2, 3, 4, 5, 6, 7, 8, ...)" in absent
