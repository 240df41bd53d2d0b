"""Where an export may be written, who writes there at one time, and the bytes of its files."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_smartinfinity.cli.main import main
from lightning_smartinfinity.errors import (
    CheckpointError,
    ConfigError,
    SmartInfinityError,
    StorageError,
    StorageLockedError,
    UnsupportedError,
)
from lightning_smartinfinity.export.destination import require_room, staged
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.export.from_training import save_module
from lightning_smartinfinity.export.safetensors_file import SafetensorsFile
from lightning_smartinfinity.storage.folders.replacement import beside
from lightning_smartinfinity.storage.folders.staging_folder import mark_of
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import TensorSpec
from tests.export.models import Trained, files_of
from tests.helpers.silent_disk import SECONDS, SilentDisk, gives_up

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


@pytest.mark.parametrize("keeps_others", [False, True])
def test_what_lies_where_an_export_is_written_stays(keeps_others: bool, tmp_path: Path) -> None:
    """A folder that has the hidden name by chance is refused, with the name of a file in it."""
    precious = beside(tmp_path / "out") / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("precious")
    refused = pytest.raises(CheckpointError, match=f"{precious} is in the way")
    with refused, staged(tmp_path / "out", keeps_others=keeps_others):
        pass
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [precious]


def test_a_killed_export_whose_folder_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, and the earlier export that the killed one was replacing stays for the next one to put back."""
    out, room = tmp_path / "out", beside(tmp_path / "out") / "killed"
    room.mkdir(parents=True)
    (room / ".saving-previous").write_text("earlier")
    mark_of(room.parent).touch()
    monkeypatch.setattr(os, "scandir", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StorageError, match=f"Reading '{room.parent}' failed"), staged(out):
        pass
    assert (room / ".saving-previous").read_text() == "earlier"


# ---- paths that nothing can be put at


@pytest.mark.parametrize("name", [".", "", "..", "/", "/dev/shm", "x\0y", "/proc/x", "link"])
def test_a_path_that_cannot_be_replaced(
    name: str, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways to save refuse it, before anything is written."""
    checkpoint, here = trained("llama").checkpoint, tmp_path / "a" / "b"
    here.mkdir(parents=True)
    (here / "link").symlink_to(here / "gone")
    monkeypatch.chdir(here)
    message = "current folder|mount point|NUL byte|cannot be written|which does not exist"
    with pytest.raises(SmartInfinityError, match=message):
        export_checkpoint(checkpoint, Path(name), ExportSettings())
    with pytest.raises(SmartInfinityError, match=message):
        save_module(torch.nn.Linear(2, 2), Path(name))
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "link"]


SIZES = ["0", "0GB", "-1", "-5GB", "x", "", "nan", "nanGB", "inf", "infGB", "5XB", "GB", "\u0665GB"]


@pytest.mark.parametrize("size", [*SIZES, 0, -1, True, 1.5])
def test_a_size_of_files_that_is_none(size: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways to save and the command name the value, and write nothing."""
    with pytest.raises(ConfigError, match=re.escape(f"max_shard_size={size!r}")):
        ExportSettings(max_shard_size=size)
    with pytest.raises(ConfigError, match=re.escape(f"max_shard_size={size!r}")):
        save_module(torch.nn.Linear(2, 2), tmp_path / "out", max_shard_size=size)
    if isinstance(size, str):
        assert main(["export", str(tmp_path), str(tmp_path / "out"), f"--max-shard-size={size}"]) == 1
        assert repr(size) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def written(path: Path, tensors: dict[str, torch.Tensor], window: int) -> bytes:
    """Write tensors by windows, the last one first."""
    file = SafetensorsFile(path, {name: TensorSpec(value.shape, value.dtype) for name, value in tensors.items()})
    for name, value in tensors.items():
        for begin in reversed(range(0, value.numel(), window)):
            file.write(name, begin, value.flatten()[begin : begin + window])
    file.close()
    return path.read_bytes()


@pytest.mark.parametrize("window", [1, 3, 1000])
def test_the_library_would_write_the_same_bytes(window: int, tmp_path: Path) -> None:
    """Names, odd sizes, no dimension, no element, transposed and mixed dtypes: the bytes are those of save_file."""
    from safetensors.torch import save_file

    tensors = {
        "b.weight": torch.randn(3, 5).bfloat16(),
        "a.weight": torch.randn(3, 5).bfloat16(),
        'quote"d.ä': torch.randn(7).half(),
        "wide": torch.randn(4, 3).double(),
        "single": torch.randn(()),
        "none": torch.randn(0, 4),
        "turned": torch.randn(4, 6).T,
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "codes": torch.arange(5, dtype=torch.uint8),
    }
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    assert written(tmp_path / "ours", tensors, window) == (tmp_path / "theirs").read_bytes()


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    """The error names the tensor, and there is no file."""
    with pytest.raises(UnsupportedError, match=r"'a' is of torch.complex128"):
        SafetensorsFile(tmp_path / "file", {"a": TensorSpec(torch.Size([4]), torch.complex128)})
    assert not (tmp_path / "file").exists()


def test_an_incomplete_file_is_noticed(tmp_path: Path) -> None:
    """A file in which elements are missing is never closed as complete."""
    file = SafetensorsFile(tmp_path / "file", {"a": TensorSpec(torch.Size([4]), torch.float32)})
    file.write("a", 0, torch.zeros(3))
    with pytest.raises(AssertionError, match="not all elements"):
        file.close()
    file.abandon()


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        ("statvfs", "Looking for free space in"),
        ("posix_fallocate", r"Allocating \d+ bytes for"),
        ("pwrite", "Writing"),
        ("fdatasync", "Flushing"),
    ],
)
def test_a_disk_that_does_not_answer_an_export(tmp_path: Path, disk: SilentDisk, call: str, doing: str) -> None:
    """The error names the folder or the file."""
    disk.hang(os, call)
    path = tmp_path / "model.safetensors"
    with gives_up(tmp_path if call == "statvfs" else path, doing), io_limit(SECONDS):
        require_room(path, 1)
        file = SafetensorsFile(path, {"a": TensorSpec(torch.Size([2]), torch.float32, trained=True)})
        file.write("a", 0, torch.ones(2))
        file.close()
