"""The file on a card's SSD that gradients pass through."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.errors import StorageError


def test_a_link_or_pipe_in_its_place(tmp_path: Path) -> None:
    """It is refused and stays, and what a link leads to does not change."""
    target, path = tmp_path / "precious", tmp_path / "gradients.tmp"
    target.write_text("precious")
    for kind, put in {"a symbolic link": lambda: path.symlink_to(target), "a pipe": lambda: os.mkfifo(path)}.items():
        put()
        with ExitStack() as resources, pytest.raises(StorageError, match=f"is {kind}"):
            open_gradient_file(tmp_path, 4096, resources)
        assert target.read_text() == "precious"
        path.unlink()
