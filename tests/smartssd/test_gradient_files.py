"""The file on a card's SSD that gradients pass through."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.devices.smartssd import gradient_files
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.errors import StorageError


@pytest.fixture(params=[True, False], ids=["files without names", "no files without names"])
def _file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that can make files without names, and one that cannot."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, os.strerror(95))
        return real(path, flags, *args, **kwargs)

    if not request.param:
        monkeypatch.setattr(os, "open", refusing)


@pytest.mark.usefixtures("_file_system")
def test_it_has_no_name(tmp_path: Path) -> None:
    """Nothing is left of it, and what others have put there, whatever its name, stays."""
    target, folder = tmp_path / "precious", tmp_path / "folder"
    target.write_text("precious")
    folder.mkdir()
    (folder / gradient_files._NAME).symlink_to(target)
    with ExitStack() as resources:
        file = open_gradient_file(folder, 8192, resources)
        assert file.direct and os.listdir(folder) == [gradient_files._NAME]
    assert target.read_text() == "precious" and (folder / gradient_files._NAME).is_symlink()


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, and its descriptor is closed."""
    closed: list[int] = []

    def full(descriptor: int, *_: int) -> None:
        closed.append(descriptor)
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with ExitStack() as resources, pytest.raises(StorageError, match=r"Allocating 8192 bytes for .*gradients\.tmp"):
        open_gradient_file(tmp_path, 8192, resources)
    (descriptor,) = closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
