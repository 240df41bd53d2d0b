"""Files written window by window have the bytes of the safetensors library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.export.safetensors_file import SafetensorsFile
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import TensorSpec
from tests.helpers.silent_disk import SECONDS, SilentDisk, gives_up


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


def test_an_incomplete_file_is_noticed(tmp_path: Path) -> None:
    """A file in which elements are missing is never closed as complete."""
    file = SafetensorsFile(tmp_path / "file", {"a": TensorSpec(torch.Size([4]), torch.float32)})
    file.write("a", 0, torch.zeros(3))
    with pytest.raises(AssertionError, match="not all elements"):
        file.close()
    file.abandon()


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    """The error names the tensor, and there is no file."""
    with pytest.raises(UnsupportedError, match=r"'a' is of torch.complex128"):
        SafetensorsFile(tmp_path / "file", {"a": TensorSpec(torch.Size([4]), torch.complex128)})
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("call", "doing"),
    [("posix_fallocate", r"Allocating \d+ bytes for"), ("pwrite", "Writing"), ("fdatasync", "Flushing")],
)
def test_a_file_of_an_export_that_is_not_written(tmp_path: Path, disk: SilentDisk, call: str, doing: str) -> None:
    """The error names the file."""
    disk.hang(os, call)
    path = tmp_path / "model.safetensors"
    with gives_up(path, doing), io_limit(SECONDS):
        file = SafetensorsFile(path, {"a": TensorSpec(torch.Size([2]), torch.float32, trained=True)})
        file.write("a", 0, torch.ones(2))
        file.close()
