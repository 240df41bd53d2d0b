"""Files of tensors: they have their own folder, and closing leaves nothing behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_smartinfinity.errors import StorageCorruptError, StorageFullError, StorageLockedError
from lightning_smartinfinity.store import TensorFiles, measure_parameter_space, require_space
from lightning_smartinfinity.store.tensor_files import remove_leftovers
from tests.helpers.waiting import PROCESS_LIMIT
from tests.store.makers import create

BLOCK = 4096


def make(*folders: Path, **kwargs: object) -> TensorFiles:
    return TensorFiles(folders, **{"job": "default", "rank": 0, "direct_io": "off", **kwargs})  # type: ignore[arg-type]


def sizes_of(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("parameters.bin")]


def grow(files: TensorFiles, nbytes: int) -> None:
    os.truncate(files.files[0].path, nbytes)


def test_closing_removes_everything(tmp_path: Path) -> None:
    """Closing removes the file, the lock and the folders, and leaves the optimizer state of the same job alone."""
    files, store = make(tmp_path), create([tmp_path])
    grow(files, BLOCK)
    files.close()
    files.close()
    assert {path.name for path in (tmp_path / "default").iterdir()} == {"rank-00000"}
    store.close(remove=True)
    assert not list(tmp_path.iterdir())


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second process is refused, and the first keeps its file."""
    files = make(tmp_path)
    grow(files, BLOCK)
    with pytest.raises(StorageLockedError, match="parameters-00000"):
        make(tmp_path)
    assert sizes_of(tmp_path) == [BLOCK]
    files.close()


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    """The next process starts with an empty file."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from lightning_smartinfinity.store import TensorFiles\n"
        "files = TensorFiles([Path(sys.argv[1])], job='default', rank=0, direct_io='off')\n"
        "os.posix_fallocate(os.open(files.files[0].path, os.O_RDWR), 0, 1 << 20)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run(
            [sys.executable, "-c", script, tmp_path], env=environment, check=False, timeout=PROCESS_LIMIT
        ).returncode
        == -9
    )
    assert sizes_of(tmp_path) == [1 << 20]
    files = make(tmp_path)
    assert sizes_of(tmp_path) == [0]
    files.close()


def left_by(rank: int, folder: Path) -> None:
    """Leave what a killed process leaves."""
    files = make(folder, rank=rank)
    grow(files, BLOCK)
    for each in files._folders:
        each._lock.forget()


def test_what_killed_ranks_left(tmp_path: Path) -> None:
    """All of it is removed, whichever ranks they were, but for what a process uses, and other jobs' and somebody's."""
    for rank in (0, 2, 123456):
        left_by(rank, tmp_path)
    used = make(tmp_path, rank=1)
    (tmp_path / "default/parameters-00002/thesis.txt").touch()
    (tmp_path / "default/parameters-00004").touch()
    (tmp_path / "default/parameters-5").mkdir()
    make(tmp_path, job="other").files[0].close()
    remove_leftovers([tmp_path, tmp_path / "none"], job="default", spared=[0])
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*/*")}
    assert names == {
        *(f"default/parameters-{rank}/{name}" for rank in ("00000", "00001") for name in ("lock", "parameters.bin")),
        "default/parameters-00002/thesis.txt",
        *(f"other/parameters-00000/{name}" for name in ("lock", "parameters.bin")),
    }
    used.close()
    remove_leftovers([tmp_path], job="default")
    assert sorted(path.name for path in (tmp_path / "default").iterdir()) == [
        "parameters-00002",
        "parameters-00004",
        "parameters-5",
    ]


@pytest.mark.parametrize("how", ["noise", "zeros", "removed"])
def test_a_lock_that_lost_its_notes(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Parameters that a killed process left beside a damaged lock stop no job; they are set aside, and not deleted."""
    folder = tmp_path / "default/parameters-00000"
    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(0o700)
    noise = b"\xff123\nparameters.bin\n"
    if how != "removed":
        (folder / "lock").write_bytes(noise if how == "noise" else bytes(len(noise)))
    for number in (1, 2):
        (folder / "parameters.bin").write_bytes(b"%d" % number)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            files = make(tmp_path)
        aside = f"parameters.bin.{number}.aside"
        assert sizes_of(tmp_path) == [0] and (folder / aside).read_bytes() == b"%d" % number
        message = caplog.records[-1].getMessage()
        assert str(folder / "parameters.bin") in message and aside in message
        files.close()
    assert not (folder / "lock").exists() and not (folder / "parameters.bin").exists()
    if how == "noise":
        assert (folder / "lock.1.aside").read_bytes() == noise


def test_a_damaged_lock_beside_something_else(tmp_path: Path) -> None:
    """A damaged lock in a folder of parameters that holds other files too is refused, and all of it stays."""
    folder = tmp_path / "default/parameters-00000"
    folder.mkdir(mode=0o700, parents=True)
    for name in ("lock", "parameters.bin", "thesis.txt"):
        (folder / name).write_bytes(b"precious")
    with pytest.raises(StorageCorruptError, match="is not a lock of this package"):
        make(tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(
        ("lock", "parameters.bin", "thesis.txt"), b"precious"
    )


def test_too_little_space_for_the_parameters(tmp_path: Path) -> None:
    """Parameters too large for the file system are refused beforehand, and the error says that they need the space."""
    with pytest.raises(StorageFullError, match=r"The parameters need .* GiB in .*, where .* are free"):
        require_space(measure_parameter_space([tmp_path], sizes=[1 << 60]))
    assert not list(tmp_path.iterdir())
