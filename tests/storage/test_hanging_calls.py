"""Set-up, recovery, scrubs and lists of jobs end in time if their disk does not answer, and leave nothing by halves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.storage import PARAMETERS, TensorStore, measure_tensor_space, recover_store
from lightning_smartinfinity.storage.io import deadlines as in_time
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.storage.jobs import jobs
from lightning_smartinfinity.storage.state import scrub
from tests.helpers.attacks import Attack
from tests.helpers.silent_disk import ERROR, SAID, SECONDS, SilentDisk, gives_up
from tests.storage.makers import create, left, recovered, tree

Capture: TypeAlias = pytest.CaptureFixture[str]


def create_store(storage: Path) -> None:
    create([storage], io_timeout=SECONDS)


def recover(storage: Path) -> None:
    recover_store([storage], io_timeout=SECONDS)


def measure(storage: Path) -> None:
    with io_limit(SECONDS):
        measure_tensor_space([storage], sizes=[1], what=PARAMETERS)


def create_tensors(storage: Path) -> None:
    TensorStore([storage], job="default", direct_io="auto", io_timeout=SECONDS)


STATE = "default/rank-00000/state.bin"


@pytest.mark.parametrize(
    ("name", "call", "doing", "of"),
    [
        pytest.param("posix_fallocate", create_store, r"Allocating \d+ bytes for", STATE, id="allocating"),
        pytest.param("statvfs", measure, "Looking for free space in", "", id="free space"),
        pytest.param("fchmod", create_tensors, "Creating a file in", "default", id="file for parameters"),
        pytest.param("pread", recover, "Reading", STATE, id="recovery"),
    ],
)
def test_set_up_and_recovery(
    name: str, call: Callable[[Path], None], doing: str, of: str, tmp_path: Path, disk: SilentDisk, attack: Attack
) -> None:
    """The error names file or folder, and later calls are refused. Once the disk answers, all is as it was before."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    storage = tmp_path / "storage"
    storage.mkdir()
    if call is recover:
        left(storage)
    before = tree(storage)

    def concerns(asked: object, *_: object) -> bool:
        return name != "pread" or os.readlink(f"/proc/self/fd/{asked}") == str(storage / STATE)

    disk.hang(os, name, when=concerns)
    with gives_up(storage / of, doing):
        call(storage)
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        call(storage)
    disk.answer()
    assert tree(storage) == before
    assert call is not recover or recovered(storage) == 0


def test_files_that_do_not_grow(tmp_path: Path, disk: SilentDisk, attack: Attack) -> None:
    """A store that is to be spread anew over its folders ends in time, and its tasklets stay where they are."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders, io_timeout=SECONDS)
    before = store.counts
    disk.hang(os, "posix_fallocate")
    with gives_up(folders[0] / "default" / "rank-00000" / "state.bin", r"Extending to \d+ bytes"):
        store.spread([sum(before), 0])
    assert store.counts == before
    disk.answer()
    store.close(remove=True)


SCRUB = ("a disk stops answering while a checkpoint or state is scrubbed", SAID)
JOBS = ("a disk stops answering while jobs are listed or removed", ERROR)


@pytest.mark.parametrize(
    ("module", "name", "command", "row"),
    [
        (jobs, "find_jobs", ["scrub"], SCRUB),
        (scrub, "_newest", ["scrub"], SCRUB),
        (os, "scandir", ["jobs"], JOBS),
        (os, "unlink", ["jobs", "--remove", "default"], JOBS),
    ],
)
def test_commands_whose_disk_does_not_answer(
    module: Any,
    name: str,
    command: list[str],
    row: tuple[str, str],
    tmp_path: Path,
    disk: SilentDisk,
    attack: Attack,
    capsys: Capture,
) -> None:
    """A scrub says that it cannot tell. The list of jobs, and the removal of one, end. Both name the folder."""
    attack(row[0], tries=1, outcome=row[1])
    left(tmp_path, world_size=1)
    disk.works_until_it_hangs()
    disk.hang(module, name)
    with io_limit(SECONDS):
        status = main([command[0], str(tmp_path), "--quiet", *command[1:]])
    assert status == 2 if row == SCRUB else status != 0
    assert disk.hung == 1
    assert f"did nothing for {SECONDS} s" in capsys.readouterr().err
    disk.answer()


def test_jobs_beside_a_disk_that_does_not_answer(
    tmp_path: Path, disk: SilentDisk, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs of the other folders are listed, and the exit status says that some are unknown."""
    folders = [tmp_path / name for name in ("dead", "works")]
    for folder in folders:
        left(folder, world_size=1)
    (tmp_path / "mounts").write_text(f"/dev/a {folders[0]} ext4 rw 0 0\n")
    monkeypatch.setattr(in_time, "_MOUNTS", tmp_path / "mounts")
    disk.hang(os, "scandir", when=lambda path, *_: path == folders[0])
    with io_limit(SECONDS):
        assert main(["jobs", *map(str, folders), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert f"'{folders[0]}' did not return" in err
    assert str(folders[1] / "default") in out
    disk.answer()
