"""Kept stores in other formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.errors import ConfigError, StorageError
from lightning_smartinfinity.store import StateStore
from lightning_smartinfinity.transfer.convert import convert_store
from tests.transfer.harness import Case, Run, assert_equal, running

FORMATS = ["fp32", "bf16", "int8", "int8_remainder"]


def kept(folder: Path, case: Case) -> dict[str, torch.Tensor]:
    """A store with three steps behind it, closed and left there; its state."""
    run = Run(folder, case)
    run.steps(range(3))
    state = run.state()
    run.close(remove=False)
    return state


def opened(folder: Path, case: Case, partition: torch.Tensor) -> dict[str, torch.Tensor]:
    with running(folder, case, recover=True) as run:
        for tensor, group in zip(run.partition, run.layout.sub_groups, strict=True):
            tensor.copy_(partition[group.offset : group.offset + group.numel])
        return run.state()


@pytest.mark.parametrize("state_format", FORMATS)
def test_there_and_back(tmp_path: Path, state_format: str) -> None:
    """What a format holds survives a trip through fp32 to the bit, step counts too; the source is not touched."""
    case = Case(dtype=torch.bfloat16, state_format=state_format, num_devices=2)
    wide = case.but(state_format="fp32", num_devices=1, tasklet_bytes=100_000)
    state = kept(tmp_path / "first", case)
    disks = [tmp_path / "first" / "disk0", tmp_path / "first" / "disk1"]
    convert_store(disks, [tmp_path / "wide" / "disk0"], state_format="fp32", tasklet_bytes=100_000)
    back = [tmp_path / "back" / "disk0", tmp_path / "back" / "disk1"]
    convert_store([tmp_path / "wide" / "disk0"], back, state_format=state_format, tasklet_bytes=64 * 1024)
    for folder, variant in (("first", case), ("wide", wide), ("back", case)):
        assert_equal(opened(tmp_path / folder, variant, state["partition"]), state)


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    """Unknown formats, remainders without bf16 and no store at all are refused, and nothing is left behind."""
    kept(tmp_path, Case())
    source, into = [tmp_path / "disk0"], [tmp_path / "new"]
    with pytest.raises(ConfigError, match=r"'int2'.*unknown"):
        convert_store(source, into, state_format="int2")
    with pytest.raises(ConfigError, match="needs parameters in bf16; these are in float32"):
        convert_store(source, into, state_format="int8_remainder")
    with pytest.raises(StorageError, match="no optimizer state"):
        convert_store(source, into, state_format="bf16", rank=1)
    assert not into[0].exists()
    StateStore.recover(source).close(remove=True)


def test_damaged_source(tmp_path: Path) -> None:
    """A flipped bit is found while reading, and the new store is removed."""
    kept(tmp_path, Case())
    path = next(tmp_path.rglob("state.bin"))
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    content[len(content) // 2 + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="does not match its checksum"):
        convert_store([tmp_path / "disk0"], [tmp_path / "new"], state_format="int8")
    assert not list((tmp_path / "new").rglob("state.bin"))
