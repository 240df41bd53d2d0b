"""Direct I/O that is requested, missing or switched off."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage import recover_store
from tests.native.stored import takes_direct
from tests.storage.makers import commit_generation, create, created, tree


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder on a tmpfs."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_block_device_is_direct(tmp_path: Path) -> None:
    """Direct I/O is used without a warning where the file system has it, and never if it is switched off."""
    choices = {"auto": True, "on": True, "off": False} if takes_direct(tmp_path) else {"off": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for choice, direct in choices.items():
            with created([tmp_path], direct_io=choice) as store:
                assert store.files[0].direct is direct


def test_memory_file_system_warns(memory_folder: Path) -> None:
    """A tmpfs warns, because state there takes the host memory that it is meant to save. direct_io="off" is silent.

    With direct_io="on" it is refused, and nothing is left behind.
    """
    with pytest.warns(UserWarning, match="tmpfs, which lives in host memory.*direct_io='off'"):
        store = create([memory_folder])
    assert store.files[0].direct is False
    commit_generation(store, 0)
    store.close(remove=False)
    with pytest.warns(UserWarning, match="tmpfs"):
        recover_store([memory_folder]).close(remove=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create([memory_folder], direct_io="off").close(remove=True)
    with pytest.raises(StorageError, match="tmpfs") as caught:
        create([memory_folder], direct_io="on")
    assert "direct_io='auto'" in caught.value.remedy
    assert tree(memory_folder) == set()


def test_file_system_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If opening with O_DIRECT fails, "auto" warns and uses the page cache, and "on" is an error."""
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="refuses O_DIRECT"):
        create([tmp_path]).close(remove=True)
    with pytest.raises(StorageError, match="refuses O_DIRECT"):
        create([tmp_path], direct_io="on")
    assert tree(tmp_path) == set()
