"""The file on a card's SSD that gradients pass through."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_smartinfinity.devices.smartssd import gradient_files
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.errors import StorageError


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_it_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_unnamed: bool) -> None:
    """Nothing is left of it, and what others have put there, whatever its name, stays.

    That is so on a file system that can make files without names, and on one that cannot.
    """
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, os.strerror(95))
        return real(path, flags, *args, **kwargs)

    target, folder = tmp_path / "precious", tmp_path / "folder"
    target.write_text("precious")
    folder.mkdir()
    (folder / gradient_files._NAME).symlink_to(target)
    if not has_unnamed:
        monkeypatch.setattr(os, "open", refusing)
    with ExitStack() as resources:
        file = open_gradient_file(folder, 8192, resources)
        assert file.direct and os.listdir(folder) == [gradient_files._NAME]
    assert target.read_text() == "precious" and (folder / gradient_files._NAME).is_symlink()


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, and its descriptor is closed."""
    full = mock.Mock(side_effect=OSError(28, os.strerror(28)))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with ExitStack() as resources, pytest.raises(StorageError, match=r"Allocating 8192 bytes for .*gradients\.tmp"):
        open_gradient_file(tmp_path, 8192, resources)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(full.call_args.args[0])
