"""Folders whose names are no text: bytes that are not UTF-8, which Python shows as lone surrogates."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.errors import StorageCorruptError
from lightning_smartinfinity.native import HostBuffer
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.storage.folders.replacement import beside
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore
from tests.cli.test_jobs import damage
from tests.helpers.unnamed import unnamed_files
from tests.storage.makers import commit_generation, left, recovered

BLOCK = 4096
CAFE = os.fsdecode(b"caf\xe9")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / CAFE).mkdir()
    return tmp_path / CAFE


def test_a_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State is written, found again and scrubbed. Damage is told with the path, in which such bytes are escaped."""
    state = left(folder, world_size=1) / "state.bin"
    assert state == folder / "default/rank-00000/state.bin"
    store = recover_store([folder])
    commit_generation(store, 1)
    store.keep()
    store.close(remove=False)
    assert store.manifest.folders == (str(folder),) and recovered(folder, remove=False) == 1
    assert main(["jobs", str(folder), "--verify", "--quiet"]) == main(["scrub", str(folder), "--quiet"]) == 0
    capsys.readouterr()
    os.truncate(state, 2 * BLOCK)
    assert main(["scrub", str(folder), "--quiet"]) == 1
    assert "caf\\xe9/default/rank-00000/state.bin" in capsys.readouterr().out
    assert main(["jobs", str(folder), "--remove", "default", "--kept"]) == 0
    assert not list(folder.iterdir())


class Memory(HostBuffer):
    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return BLOCK


def test_tensors(folder: Path) -> None:
    """Tensors are written and read, and what is damaged is told with the path."""
    store = TensorStore([folder], job="default", direct_io="off")
    stored, memory = store.add(BLOCK), Memory(BLOCK)
    view = memory.memoryview()
    view[:] = b"7" * BLOCK
    store.finish(store.write(stored, memory))
    view[:] = bytes(BLOCK)
    store.finish(store.read(stored, memory))
    assert bytes(view) == b"7" * BLOCK
    (path,) = unnamed_files(folder)
    damage(path)
    with pytest.raises(StorageCorruptError, match=r"caf\\xe9/default/\(unnamed file\)"):
        store.finish(store.read(stored, memory))
    store.close()
    assert not list(folder.iterdir())


def test_a_gradient_file(folder: Path) -> None:
    """The file that gradients travel through on a card's SSD is there as well."""
    with ExitStack() as resources:
        file = open_gradient_file(folder, 2 * BLOCK, resources)
        assert file.direct and Path(file.path).parent == folder


def test_where_a_new_save_is_written() -> None:
    """Names that are text keep the hidden name that earlier versions gave them."""
    assert beside(Path("/runs/last.ckpt")).name == ".saving-e6f69ff248c8b801"
    assert beside(Path("/runs", CAFE)).name == ".saving-dafd66c0b98965e6"
