"""Files of tensors: they have no name, and nothing is left of them, however their process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.storage import PARAMETERS, UnnamedFiles, measure_tensor_space, require_space
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from tests.helpers.unnamed import unnamed_files
from tests.native.builds import run_python
from tests.storage.makers import create, created, refuse_to_open, tree

BLOCK = 4096


def make(*storage: Path, direct_io: str = "off") -> UnnamedFiles:
    return UnnamedFiles(storage, job="default", direct_io=direct_io)


@pytest.mark.parametrize("has_unnamed", [True, False], ids=["files without names", "no files without names"])
def test_nothing_is_seen_of_them(has_unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each storage folder has a file, but neither name nor folder, and closing frees its space.

    This also holds on a file system that cannot make files without names.
    """
    storage = [tmp_path / "a", tmp_path / "b"]
    if not has_unnamed:
        refuse_to_open(monkeypatch, errno.EOPNOTSUPP, lambda flags: flags & os.O_TMPFILE == os.O_TMPFILE)
    files = make(*storage)
    assert [tree(folder) for folder in storage] == [set(), set()]
    for file, folder in zip(files.files, storage, strict=True):
        (path,) = unnamed_files(folder)
        os.truncate(path, BLOCK)
        assert file.path.startswith(f"{folder}/default/") and path.stat().st_mode & 0o777 == 0o600
    files.close()
    files.close()
    assert unnamed_files(tmp_path) == []


def test_beside_the_state_of_a_job(tmp_path: Path) -> None:
    """They are made before the state's folder and after it, by several processes, and none is in another's way."""
    before, store, after = make(tmp_path), create([tmp_path]), make(tmp_path)
    assert {path.name for path in (tmp_path / "default").iterdir()} == {"rank-00000"}
    store.close(remove=True)
    assert tree(tmp_path) == set() and len(unnamed_files(tmp_path)) == 2
    before.close()
    after.close()


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """A kill removes the files and frees their space."""
    script = """
    import os, signal, sys
    from pathlib import Path
    from lightning_smartinfinity.storage import UnnamedFiles
    from tests.helpers.unnamed import unnamed_files
    files = UnnamedFiles([Path(sys.argv[1])], job="default", direct_io="off")
    (path,) = unnamed_files(Path(sys.argv[1]))
    os.truncate(path, 1 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_python(script, tmp_path, status=-signal.SIGKILL) == "" and tree(tmp_path) == set()


def test_a_folder_that_another_rank_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's folder is made again if another rank removes it, empty, before the file is there."""
    real, removed = OpenFolder.open_unnamed, []

    def open_unnamed(folder: OpenFolder) -> int:
        if len(removed) < 2:
            os.rmdir(folder.path)
            removed.append(folder.path)
            raise FileNotFoundError
        return real(folder)

    monkeypatch.setattr(OpenFolder, "open_unnamed", open_unnamed)
    make(tmp_path).close()
    assert removed == [tmp_path / "default"] * 2 and tree(tmp_path) == set()


def test_a_file_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the folder, and neither the files of other folders nor folders made for it are left."""

    def open_unnamed(folder: OpenFolder) -> int:
        if folder.path.parent.name == "b":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(folder)

    real = OpenFolder.open_unnamed
    monkeypatch.setattr(OpenFolder, "open_unnamed", open_unnamed)
    with pytest.raises(StorageError, match=r"Creating a file in .*b/default"):
        make(tmp_path / "a", tmp_path / "new/b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and unnamed_files(tmp_path) == []


def test_too_little_space_for_the_parameters(tmp_path: Path) -> None:
    """Parameters too large for the file system are refused beforehand, and the error says that they need the space."""
    with pytest.raises(StorageFullError, match=r"The parameters need .* GiB in .*, where .* are free"):
        require_space(measure_tensor_space([tmp_path], sizes=[1 << 60], what=PARAMETERS))
    assert not list(tmp_path.iterdir())


# ---- direct I/O that is requested, missing or switched off, for state and for tensors


def of_state(folder: Path, direct_io: str) -> bool:
    with created([folder], direct_io=direct_io) as store:
        return store.files[0].direct


def of_tensors(folder: Path, direct_io: str) -> bool:
    files = make(folder, direct_io=direct_io)
    direct = files.files[0].direct
    files.close()
    return direct


Asked = Callable[[Path, str], bool]
for_both = pytest.mark.parametrize("is_direct", [of_state, of_tensors])


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder on a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@for_both
def test_a_disk(is_direct: Asked, tmp_path: Path) -> None:
    """Direct I/O is used without a warning where the file system has it, and never if it is switched off."""
    with warnings.catch_warnings(action="error"):
        assert [is_direct(tmp_path, choice) for choice in ("off", "auto", "on")] == [False, True, True]


@for_both
def test_memory_file_system_warns(is_direct: Asked, memory_folder: Path) -> None:
    """A tmpfs warns, because what is there takes the host memory that it is meant to save. direct_io="off" is silent.

    With direct_io="on" it is refused, and nothing is left behind.
    """
    with pytest.warns(UserWarning, match="tmpfs, which lives in host memory.*direct_io='off'"):
        assert not is_direct(memory_folder, "auto")
    with warnings.catch_warnings(action="error"):
        assert not is_direct(memory_folder, "off")
    with pytest.raises(StorageError, match=r"tmpfs.*direct_io='auto'"):
        is_direct(memory_folder, "on")
    assert tree(memory_folder) == set()


@for_both
def test_file_system_that_refuses(is_direct: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If direct I/O is refused, "auto" warns and uses the page cache, and "on" is an error that leaves nothing."""
    real = fcntl.fcntl

    def refuse_flag(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, value)

    refuse_to_open(monkeypatch, errno.EINVAL, lambda flags: bool(flags & os.O_DIRECT))
    monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
    with pytest.warns(UserWarning, match="refuses O_DIRECT"):
        assert not is_direct(tmp_path, "auto")
    with pytest.raises(StorageError, match="refuses O_DIRECT"):
        is_direct(tmp_path, "on")
    assert tree(tmp_path) == set()
