"""Checkpoints and conversions on a disk that does not answer end in time, and nothing has its final name by halves."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.export.destination import staged
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.checkpoints.folders import folder_swap
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import replacing
from lightning_smartinfinity.zero3.checkpoints.formats import tensor_file
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.trust import ReadWhenUsed, read_mapped
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from lightning_smartinfinity.zero3.ranks import file_systems
from tests.helpers.attacks import Attack
from tests.helpers.silent_disk import ERROR, FILE_CALLS, SAID, SECONDS, SilentDisk, gives_up
from tests.helpers.universal import save_of_two


def save_checkpoint(target: Path) -> None:
    """Save as the engine does."""
    with replacing(target, "tag") as (staging, *_):
        (staging / "tag").mkdir()
        (staging / "tag" / "weights").write_bytes(b"1")


def export(target: Path) -> None:
    with staged(target) as new:
        new.mkdir()
        (new / "weights").write_bytes(b"1")


def convert(target: Path) -> None:
    convert_checkpoint(target.parent / "two.ckpt", target)


@pytest.mark.parametrize("write", [save_checkpoint, export, convert])
def test_a_folder_that_is_not_flushed(
    tmp_path: Path, disk: SilentDisk, attack: Attack, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    """The error names what is flushed; nothing has the final name, then or later, and the next attempt succeeds."""
    attack("a disk stops answering while a folder is saved", tries=1, outcome=f"{ERROR}; nothing has the final name")
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    for module in (folder_swap, file_systems):
        monkeypatch.setattr(module, "raising_together", lambda group=None: nullcontext())
        monkeypatch.setattr(module, "gather", lambda value, group: [value])
    shapes, whole = [OrderedDict(a=torch.Size([4]))], {"a": torch.arange(4.0)}
    save_of_two(tmp_path / "two.ckpt", shapes, whole, {"momentum_buffer": 100.0})
    target = tmp_path / "target"
    disk.hang(os, "fsync")
    told = rf"Flushing '{tmp_path}.*' did not return .* {SECONDS} s"
    with pytest.raises(StorageTimeoutError, match=told), io_limit(SECONDS):
        write(target)
    assert disk.hung and not target.exists()
    disk.answer()
    assert not target.exists()
    write(target)
    assert any(path.is_file() for path in target.rglob("*"))


def test_a_conversion_waits_for_no_disk_without_a_limit(tmp_path: Path, disk: SilentDisk) -> None:
    """Each call of a conversion on a file, of the old checkpoint or the new one, would be given up."""
    shapes, whole = [OrderedDict(a=torch.Size([4]))], {"a": torch.arange(4.0)}
    save_of_two(tmp_path / "two.ckpt", shapes, whole, {"momentum_buffer": 100.0})
    for module, name in FILE_CALLS:
        disk.hang(module, name, when=lambda *_: False)
    convert(tmp_path / "target")
    disk.answer()


def test_a_parameter_in_a_mapped_file_that_is_not_read(tmp_path: Path, disk: SilentDisk, attack: Attack) -> None:
    """The read of a mapped parameter or buffer, which a page fault would make, is given up, too."""
    attack("a disk stops answering while a checkpoint is loaded", tries=1, outcome=ERROR)
    mapped = Mock(spec=torch.Tensor, clone=disk.answers.wait)
    file = tmp_path / "model_states.pt"
    for read in (lambda: ReadWhenUsed({"weight": mapped}, file)["weight"], lambda: read_mapped({"mean": mapped}, file)):
        with gives_up(file, "Reading"), io_limit(SECONDS):
            read()
        disk.answer()
        disk.answers.clear()


def test_a_description_that_is_not_written(tmp_path: Path, disk: SilentDisk) -> None:
    """Torch writes to a disk that does not answer without holding Python up."""
    path, state = tmp_path / "pipe", {"names": [f"name {number}" for number in range(50_000)]}
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with gives_up(path, "Writing"), io_limit(SECONDS):
        tensor_file.saved_with_room(state, path)
    os.set_blocking(reader, True)
    while os.read(reader, 1 << 20):
        pass
    os.close(reader)
    disk.answer()


def test_a_checkpoint_that_is_not_read(tmp_path: Path, disk: SilentDisk, attack: Attack) -> None:
    """A scrub gives it up, and tells what it found before."""
    attack("a disk stops answering while a checkpoint or state is scrubbed", tries=1, outcome=SAID)
    path = save_of_two(tmp_path / "two.ckpt", [OrderedDict(a=torch.Size([3]))], {"a": torch.arange(3.0)}, {})
    first, *_, last = sorted(path.rglob("*.pt"))
    first.write_bytes(b"damaged")
    disk.works_until_it_hangs()
    disk.hang(tensor_file, "_read_through", when=lambda archive, _: archive.filename == str(last))
    with io_limit(SECONDS):
        found = scrub_checkpoint(path, show=hidden)
    assert disk.hung == 1
    (damaged,), (unknown,) = found.damaged, found.unknown
    assert damaged.startswith(f"{first} is damaged")
    assert re.search(rf"Reading '{last}' did not return while its disk did nothing for {SECONDS} s", unknown)
    disk.answer()
