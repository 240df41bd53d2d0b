"""Files of checkpoints: universal ones, tensors that are written in pieces, and disks that do not respond."""

from __future__ import annotations

import os
import random
import re
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import CheckpointError, StorageLockedError, StorageTimeoutError
from lightning_smartinfinity.export.destination import staged
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.checkpoints.formats import saved_weights, tensor_file, universal_conversion
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import BlockChecksums, SavedArray, VerifiedBlocks
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import (
    TensorFile,
    check_records,
    room_for,
    saved_with_room,
)
from lightning_smartinfinity.zero3.checkpoints.formats.trust import ReadWhenUsed, read_mapped
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from lightning_smartinfinity.zero3.engine.record import crc32c_of_both
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit, flip_bit_behind
from tests.helpers.silent_disk import ERROR, FILE_CALLS, SAID, SECONDS, SilentDisk, gives_up
from tests.helpers.universal import save_of_two, tensors
from tests.zero3.test_folder_swap import one_process, save

__all__ = ["one_process"]

SHAPES = [OrderedDict(a=torch.Size([7, 3]), none=torch.Size([0])), OrderedDict(b=torch.Size([1]))]
WHOLE = {"a": torch.arange(21.0), "none": torch.empty(0), "b": torch.tensor([50.0])}
ARRAYS = {"momentum_buffer": 100.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of two processes, of which the second has nothing of ``b``."""
    return save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, ARRAYS)


def file_of(checkpoint: Path, rank: int, kind: str = "optim") -> Path:
    return checkpoint / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def test_arrays_are_put_together_in_windows(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion joins arrays without padding, under the optimizer's names for them.

    The optimizer state has names and counts, and no arrays.
    """
    for module in (saved_weights, universal_conversion):
        monkeypatch.setattr(module, "WINDOW_NUMEL", 4)
    convert_checkpoint(checkpoint, tmp_path / "new")
    expected = {
        f"{name}/{array}": (torch.float32, (values + offset).tolist())
        for name, values in WHOLE.items()
        for array, offset in {"fp32": 0.0, **ARRAYS}.items()
    }
    assert {name: (values.dtype, values.tolist()) for name, values in tensors(tmp_path / "new").items()} == expected
    for file in (tmp_path / "new").rglob("*.pt"):
        check_records(file, tensors=True)
    state = torch.load(tmp_path / "new/zero/optimizer_state.pt", weights_only=False)
    assert state["fp32_flat_groups"] == [] and state["ours"] == 0
    for of_group in state["optimizer_state_dict"]["state"].values():
        assert of_group["step"] == 7 and of_group["momentum_buffer"].numel() == 0


def changing(rank: int, edit: Callable[[dict[str, Any]], object], kind: str = "optim") -> Callable[[Path], None]:
    """Return a function that rewrites a file of a checkpoint with changed content."""

    def change(checkpoint: Path) -> None:
        content = torch.load(file_of(checkpoint, rank, kind), weights_only=False)
        edit(content)
        torch.save(content, file_of(checkpoint, rank, kind))

    return change


def optimizer_in(content: dict[str, Any]) -> dict[str, Any]:
    return content["optimizer_state_dict"]["optimizer_state_dict"]  # type: ignore[no-any-return]


def states_in(content: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return optimizer_in(content)["state"]  # type: ignore[no-any-return]


def flip(checkpoint: Path, rank: int) -> None:
    """Flip a bit of the momentum of ``a``."""
    state = states_in(torch.load(file_of(checkpoint, rank), weights_only=False))
    flip_bit_behind(state[0]["momentum_buffer"].numpy().tobytes()[:8], file_of(checkpoint, rank))


def elsewhere(content: dict[str, Any]) -> None:
    shapes = content["param_shapes"][0]
    shapes["../elsewhere"] = shapes.pop(next(iter(shapes)))


def array_elsewhere(content: dict[str, Any]) -> None:
    for state in states_in(content).values():
        state["../elsewhere"] = state.pop("momentum_buffer")


def of_weights_only(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["smart_infinity"] = {"weights_only": True, "save_id": None}


NO_ARRAY = "'momentum_buffer' is no array in float32 of every element"
WITHOUT_ENTRY = r"rank_0_.*optim_states\.pt.*the file is damaged"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of an array": (lambda c: flip(c, 1), r"rank_1_.*optim_states\.pt is damaged: the checksum"),
    "a file is missing": (lambda c: file_of(c, 1).unlink(), "optimizer states of 1 processes; 2 saved"),
    "model states are missing": (lambda c: file_of(c, 1, "model").unlink(), "model states of 1 processes; 2 saved"),
    "model states are damaged": (
        lambda c: flip_bit_behind(b"of_user", file_of(c, 1, "model")),
        r"rank_1_.*model_states\.pt is damaged",
    ),
    "groups with momentum and without": (changing(0, lambda c: states_in(c)[1].pop("momentum_buffer")), NO_ARRAY),
    "an array is too short": (
        changing(0, lambda c: states_in(c)[0].update(momentum_buffer=torch.zeros(3))),
        "'momentum_buffer' is no array",
    ),
    "a process without arrays": (changing(1, lambda c: states_in(c).clear()), "kept different states"),
    "a parameter elsewhere": (changing(0, elsewhere, "model"), r"names a parameter '\.\./elsewhere'"),
    "an array elsewhere": (changing(0, array_elsewhere), r"arrays of the names \['\.\./elsewhere'\]"),
    "weights only": (changing(0, of_weights_only), "weights only"),
    "of two saves": (changing(1, lambda c: c.update(smart_infinity_save="another"), "model"), "different saves"),
    "no states": (changing(0, lambda c: optimizer_in(c).pop("state")), WITHOUT_ENTRY),
    "no groups": (changing(0, lambda c: optimizer_in(c).pop("param_groups")), WITHOUT_ENTRY),
    "no checkpoint": (lambda c: shutil.rmtree(c / "checkpoint"), "has no folder 'checkpoint'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_converted_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """The error names what cannot be converted, and no output is left."""
    damage, named = DAMAGES[name]
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=named) as caught:
        convert_checkpoint(checkpoint, tmp_path / "new")
    assert caught.value.remedy and list(tmp_path.iterdir()) == [checkpoint]


def test_a_folder_that_exists_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    """A folder that exists is left alone unless it is empty, as one looks that a file system only remembers."""
    new = tmp_path / "new"
    new.mkdir()
    (new / "file").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        convert_checkpoint(checkpoint, new)
    (file,) = new.iterdir()
    file.unlink()
    convert_checkpoint(checkpoint, new)
    assert (new / "zero").is_dir()


@pytest.mark.parametrize(
    ("call", "error", "told", "remedy"),
    [
        ("write_all", OSError(28, "No space left on device"), r"new could not be written: .*No space", "Free space"),
        ("read_at", OSError(5, "Input/output error"), r"two\.ckpt/checkpoint could not be loaded: .*Input/output", ""),
    ],
)
def test_a_disk_that_fails(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: OSError, told: str, remedy: str
) -> None:
    """The error names the folder that could not be written or read; partial output is removed."""
    monkeypatch.setattr(tensor_file.TensorFile, call, Mock(side_effect=error))
    with pytest.raises(CheckpointError, match=told) as caught:
        convert_checkpoint(checkpoint, tmp_path / "new")
    assert remedy in caught.value.remedy and list(tmp_path.iterdir()) == [checkpoint]


def test_two_conversions_to_one_path(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one writes, another is refused with the path. The next one removes what a killed one left, and is whole."""

    def meanwhile(state: Any, file: Path) -> None:
        with pytest.raises(StorageLockedError, match=f"Another process is writing to {tmp_path / 'new'} now"):
            convert_checkpoint(checkpoint, tmp_path / "new")
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("lightning_smartinfinity.storage.folders.staging_folder._remove_tree", lambda _: None)
        patched.setattr(universal_conversion, "save_flushed", meanwhile)
        with pytest.raises(CheckpointError, match="killed"):
            convert_checkpoint(checkpoint, tmp_path / "new")
    assert len(list(tmp_path.iterdir())) == 2
    convert_checkpoint(checkpoint, tmp_path / "new")
    for file in (tmp_path / "new").rglob("*.pt"):
        check_records(file, tensors=True)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "new", checkpoint]


# ---- large tensors in files of torch.save are written and read in pieces


NUMELS = (1_000, 0, 7, 20_000)


def content() -> list[np.ndarray]:
    return [np.random.default_rng(k).standard_normal(sum(NUMELS), np.float32) for k in range(2)]


def described() -> dict[str, Any]:
    """Return a state with two arrays in runs of tensors, among everything else that a state holds."""
    return {
        "step": torch.tensor(3.0),
        "first": [room_for(numel) for numel in NUMELS],
        "groups": [{"lr": torch.arange(6.0)[2:4], "betas": (0.9, torch.tensor(0.5, dtype=torch.float64))}],
        "second": {index: room_for(numel) for index, numel in enumerate(NUMELS)},
        "none": torch.empty(0),
        "word": "word",
    }


def tensors_of(state: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return state["first"], list(state["second"].values())


def pieces(values: np.ndarray, size: int) -> list[np.ndarray]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def write(path: Path, *, size: int = 777) -> None:
    with closing(saved_with_room(described(), path)) as file:
        for tensors, values in zip(tensors_of(file.state), content(), strict=True):
            stream = file.stream(tensors)
            for piece in pieces(values, size):
                stream.write(piece)
        file.flush()


def read(path: Path, *, size: int = 311) -> list[np.ndarray]:
    with closing(TensorFile(path)) as file:
        found = []
        for tensors in tensors_of(file.state):
            values = np.full(sum(NUMELS), np.nan, np.float32)
            stream = file.stream(tensors)
            for piece in pieces(values, size):
                stream.read(piece)
            found.append(values)
    return found


@pytest.mark.seam("room in a file, filled later", "torch._subclasses.fake_tensor, the zip format of torch.save.")
@pytest.mark.parametrize("size", [13, 777, 10_000, 1 << 20])
def test_torch_reads_what_was_written_in_pieces(size: int, tmp_path: Path) -> None:
    """Torch loads tensors, views and everything else from the file, and its zip checksums are right."""
    write(tmp_path / "file.pt", size=size)
    for mmap in (False, True):
        state = torch.load(tmp_path / "file.pt", weights_only=True, mmap=mmap)
        for found, values in zip(tensors_of(state), content(), strict=True):
            assert [tensor.numel() for tensor in found] == list(NUMELS)
            assert torch.cat(found).numpy().tobytes() == values.tobytes()
        (group,) = state["groups"]
        assert (state["step"], group["lr"].tolist(), group["betas"][1]) == (3, [2, 3], 0.5)
        assert (state["word"], state["none"].numel()) == ("word", 0)
    assert zipfile.ZipFile(tmp_path / "file.pt").testzip() is None


def test_files_of_torch_are_read_in_pieces(tmp_path: Path) -> None:
    """A file that torch saved is read in pieces, also where its tensors are slices of one storage."""
    first, second = content()
    state = {
        "first": list(torch.from_numpy(first).split(NUMELS)),
        "second": {index: part.clone() for index, part in enumerate(torch.from_numpy(second).split(NUMELS))},
    }
    torch.save(state, tmp_path / "file.pt")
    assert [*map(bytes, read(tmp_path / "file.pt"))] == [bytes(first), bytes(second)]


def test_a_flipped_bit_is_found_wherever_it_matters(tmp_path: Path, attack: Attack) -> None:
    """Each of 100 single flipped bits is either reported with the file's name or changes nothing that is read."""
    attack("bit flip in a torch file", tries=100, outcome="CheckpointError, or nothing that is read changes")
    path = tmp_path / "file.pt"
    write(path)
    good, generator, found = path.read_bytes(), random.Random(0), 0
    for _ in range(100):
        path.write_bytes(good)
        flip_bit(path, generator)
        try:
            check_records(path, tensors=False)
            assert [*map(bytes, read(path, size=1 << 20))] == [*map(bytes, content())]
        except CheckpointError as error:
            assert str(path) in str(error)
            found += 1
    assert found > 80


def test_a_tensor_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    """Tensors are looked for in dictionaries and lists; one inside another object must not become zeros."""
    state = {**described(), "object": torch.nn.Linear(2, 2)}
    with pytest.raises(CheckpointError, match="inside of objects"):
        saved_with_room(state, tmp_path / "file.pt")


# ---- checksums of blocks of values, and of data that several processes hold


BLOCK = 65536
ARRAY = SavedArray("weight/fp32.pt", "fp32")


def checksums_of(values: np.ndarray, part: int) -> list[int]:
    checksums = BlockChecksums()
    for begin in range(0, len(values), part):
        checksums.add(values[begin : begin + part])
    return checksums.values


def test_parts_of_any_length_have_the_same_checksums() -> None:
    """Checksums of zeros are known: of a block, and of the rest of one."""
    values = np.random.default_rng(0).standard_normal(2 * BLOCK + 77, np.float32)
    assert checksums_of(values, 1000) == checksums_of(values, BLOCK) == checksums_of(values, len(values))
    assert len(checksums_of(values, 12345)) == 3
    assert checksums_of(np.zeros(8, np.float32), 3) == [0x8A9136AA]  # RFC 3720, B.4: 32 bytes of zeros


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (5, BLOCK), (BLOCK - 1, BLOCK + 1), (3, 2 * BLOCK + 77)])
def test_any_part_is_verified(begin: int, end: int) -> None:
    """The part is copied as it is; a bit that was flipped within its blocks raises with the file's name."""
    values = np.random.default_rng(0).standard_normal(2 * BLOCK + 77, np.float32)
    checksums = checksums_of(values, 4096)

    def read(checksums: list[int]) -> bytes:
        copy = np.empty(end - begin, np.float32)
        saved = {ARRAY: checksums}
        VerifiedBlocks(
            lambda array, begin, end: values[begin:end].copy(), saved, folder=Path("zero"), remedy="Convert it again."
        ).copy(ARRAY, begin, copy)
        return copy.tobytes()

    assert read(checksums) == values[begin:end].tobytes()
    values.view(np.uint32)[end - 1] ^= 1
    for wrong in (checksums, []):
        with pytest.raises(CheckpointError, match=r"zero/weight/fp32\.pt is damaged"):
            read(wrong)


@pytest.mark.parametrize("borders", [[], [0, 1], [777, 777, 4999]])
def test_parts_have_the_checksum_of_the_whole(borders: list[int]) -> None:
    """However data is cut, the checksums of its parts combine to that of the whole; empty parts count for nothing."""
    data, crc = np.random.default_rng(0).integers(0, 256, 5000, np.uint8), 0
    for begin, end in zip([0, *borders], [*borders, len(data)], strict=True):
        part = data[begin:end]
        crc = crc32c_of_both(crc, native.crc32c(part.ctypes.data, len(part), 0), len(part))
    assert crc == native.crc32c(data.ctypes.data, len(data), 0)


# ---- on a disk that does not answer all ends in time, and nothing has its final name by halves


def export(target: Path) -> None:
    with staged(target) as new:
        new.mkdir()
        (new / "weights").write_bytes(b"1")


def convert(target: Path) -> None:
    convert_checkpoint(target.parent / "two.ckpt", target)


@pytest.mark.parametrize("write", [partial(save, content="new"), export, convert], ids=["save", "export", "convert"])
def test_a_folder_that_is_not_flushed(
    tmp_path: Path, disk: SilentDisk, attack: Attack, write: Callable[[Path], None]
) -> None:
    """The error names what is flushed; nothing has the final name, then or later, and the next attempt succeeds."""
    attack("a disk stops answering while a folder is saved", tries=1, outcome=f"{ERROR}; nothing has the final name")
    save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, ARRAYS)
    target = tmp_path / "target"
    disk.hang(os, "fsync")
    with (
        pytest.raises(StorageTimeoutError, match=rf"Flushing '{tmp_path}.*' did not return .* {SECONDS} s"),
        io_limit(SECONDS),
    ):
        write(target)
    assert disk.hung and not target.exists()
    disk.answer()
    assert not target.exists()
    write(target)
    assert any(path.is_file() for path in target.rglob("*"))


def test_a_conversion_waits_for_no_disk_without_a_limit(tmp_path: Path, disk: SilentDisk) -> None:
    """Each call of a conversion on a file, of the old checkpoint or the new one, would be given up."""
    save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, ARRAYS)
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
