"""Where an export may be written, and who writes there at one time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_smartinfinity.errors import CheckpointError, StorageLockedError
from lightning_smartinfinity.export.destination import staged
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.store.replacement import beside
from tests.export.trained import Trained, files_of

Train = Callable[[str], Trained]


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
def test_a_second_export_to_a_path_that_another_one_writes(to: str, trained: Train, tmp_path: Path) -> None:
    """It raises and names the path, and the first one is whole."""
    checkpoint, out = trained("llama").checkpoint, tmp_path / "out"
    with staged(out) as folder:
        folder.mkdir()
        (folder / "weights").write_text("first")
        with pytest.raises(StorageLockedError, match=f"Another process is writing .*{out} now"):
            export_checkpoint(checkpoint, out, ExportSettings(to=to))
        with pytest.raises(StorageLockedError), staged(out, keeps_others=True):
            pass
    assert files_of(out) == {"weights": b"first"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_lock_that_its_owner_removed_while_another_process_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a removed file counts for nothing: the process makes a new one."""
    staging, opened, calls = beside(tmp_path / "out"), os.open, 0

    def removing(path: Path, *arguments: int) -> int:
        nonlocal calls
        descriptor = opened(path, *arguments)
        if path == staging / staging.name:
            calls += 1
            if calls == 1:
                path.unlink()
                staging.rmdir()
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", removing)
        with staged(tmp_path / "out") as file:
            file.write_text("whole")
            with pytest.raises(StorageLockedError), staged(tmp_path / "out"):
                pass
    assert calls == 3
    assert (tmp_path / "out").read_text() == "whole"


def write_both(new: Path, out: Path) -> None:
    new.write_text("exported")
    out.write_text("mine")


def test_what_another_program_puts_there_meanwhile_stays(tmp_path: Path) -> None:
    """An export looks once more before it replaces anything."""
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="replaces nothing"), staged(out) as folder:
        write_both(folder, out)
    assert out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
