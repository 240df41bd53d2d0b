"""Files of tensors: they have no name, and nothing is left of them, however their process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.errors import StorageError, StorageFullError
from lightning_smartinfinity.storage import PARAMETERS, UnnamedFiles, measure_tensor_space, require_space
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from tests.helpers.unnamed import unnamed_files
from tests.native.builds import run_python
from tests.storage.makers import create, tree

BLOCK = 4096


def make(*storage: Path, direct_io: str = "off") -> UnnamedFiles:
    return UnnamedFiles(storage, job="default", direct_io=direct_io)


@pytest.fixture(params=[True, False], ids=["files without names", "no files without names"])
def _file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that can make files without names, and one that cannot."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **kwargs)

    if not request.param:
        monkeypatch.setattr(os, "open", refusing)


@pytest.mark.usefixtures("_file_system")
def test_nothing_is_seen_of_them(tmp_path: Path) -> None:
    """Each storage folder has a file, but neither name nor folder, and closing frees its space."""
    storage = [tmp_path / "a", tmp_path / "b"]
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
    assert run_python(script, tmp_path, status=-signal.SIGKILL) == ""
    assert tree(tmp_path) == set()


def test_a_folder_that_another_rank_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's folder is made again if another rank removes it, empty, before the file is there."""
    real, removed = OpenFolder.open_unnamed, []

    def open_unnamed(folder: OpenFolder) -> int:
        if len(removed) < 2:
            os.rmdir(folder.path)
            removed.append(folder.path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
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


def test_a_folder_that_is_not_to_be_trusted(tmp_path: Path) -> None:
    """A link in place of the job's folder is refused, and so is a folder that others may write to."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "default").symlink_to("elsewhere")
    with pytest.raises(StorageError, match="is a symbolic link"):
        make(tmp_path)
    (tmp_path / "default").unlink()
    (tmp_path / "default").mkdir()
    (tmp_path / "default").chmod(0o777)
    with pytest.raises(StorageError, match="Other users may write"):
        make(tmp_path)


def test_direct_io(tmp_path: Path) -> None:
    """A file is read past the page cache if that is asked for and possible; if it is not, "auto" says so."""
    assert [make(tmp_path, direct_io=choice).files[0].direct for choice in ("off", "auto", "on")] == [False, True, True]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        with pytest.warns(UserWarning, match="tmpfs, which lives in host memory"):
            assert not make(Path(memory), direct_io="auto").files[0].direct
        with pytest.raises(StorageError, match="tmpfs"):
            make(Path(memory), direct_io="on")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(Path(memory)).close()
        assert tree(Path(memory)) == set()


def test_a_file_system_that_refuses_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If direct I/O cannot be switched on, "auto" warns and uses the page cache, and "on" leaves nothing."""

    def refuse(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.warns(UserWarning, match="refuses O_DIRECT"):
        assert not make(tmp_path, direct_io="auto").files[0].direct
    with pytest.raises(StorageError, match="refuses O_DIRECT"):
        make(tmp_path, direct_io="on")
    assert tree(tmp_path) == set()


def test_too_little_space_for_the_parameters(tmp_path: Path) -> None:
    """Parameters too large for the file system are refused beforehand, and the error says that they need the space."""
    with pytest.raises(StorageFullError, match=r"The parameters need .* GiB in .*, where .* are free"):
        require_space(measure_tensor_space([tmp_path], sizes=[1 << 60], what=PARAMETERS))
    assert not list(tmp_path.iterdir())
