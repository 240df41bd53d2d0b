"""Large tensors in files of torch.save are written and read in pieces."""

from __future__ import annotations

import random
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import BlockChecksums, SavedArray, VerifiedBlocks
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import (
    TensorFile,
    check_records,
    room_for,
    saved_with_room,
)
from lightning_smartinfinity.zero3.engine.record import crc32c_of_both
from tests.helpers.attacks import Attack

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
        for tensors, values in zip(tensors_of(state), content(), strict=True):
            assert [tensor.numel() for tensor in tensors] == list(NUMELS)
            assert torch.cat(tensors).numpy().tobytes() == values.tobytes()
        assert state["step"] == 3 and state["groups"][0]["lr"].tolist() == [2, 3]
        assert state["groups"][0]["betas"][1] == 0.5 and (state["word"], state["none"].numel()) == ("word", 0)
    assert zipfile.ZipFile(tmp_path / "file.pt").testzip() is None


def test_files_of_torch_are_read_in_pieces(tmp_path: Path) -> None:
    """A file that torch saved is read in pieces, also where its tensors are slices of one storage."""
    first, second = content()
    whole = torch.from_numpy(second)
    state = {
        "first": list(torch.from_numpy(first).split(NUMELS)),
        "second": {index: part.clone() for index, part in enumerate(whole.split(NUMELS))},
    }
    torch.save(state, tmp_path / "file.pt")
    for found, values in zip(read(tmp_path / "file.pt"), (first, second), strict=True):
        assert found.tobytes() == values.tobytes()


def test_a_flipped_bit_is_found_wherever_it_matters(tmp_path: Path, attack: Attack) -> None:
    """Each of 100 single flipped bits is either reported with the file's name or changes nothing that is read."""
    attack("bit flip in a torch file", tries=100, outcome="CheckpointError, or nothing that is read changes")
    path = tmp_path / "file.pt"
    write(path)
    good, generator, found = path.read_bytes(), random.Random(0), 0
    for _ in range(100):
        offset = generator.randrange(len(good))
        path.write_bytes(good[:offset] + bytes([good[offset] ^ (1 << generator.randrange(8))]) + good[offset + 1 :])
        try:
            check_records(path, tensors=False)
            arrays = read(path, size=1 << 20)
        except CheckpointError as error:
            assert str(path) in str(error)
            found += 1
            continue
        for actual, values in zip(arrays, content(), strict=True):
            assert actual.tobytes() == values.tobytes(), offset
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
        blocks = VerifiedBlocks(
            lambda array, begin, end: values[begin:end].copy(), saved, folder=Path("zero"), remedy="Convert it again."
        )
        blocks.copy(ARRAY, begin, copy)
        return copy.tobytes()

    assert read(checksums) == values[begin:end].tobytes()
    values.view(np.uint32)[end - 1] ^= 1
    with pytest.raises(CheckpointError, match=r"zero/weight/fp32\.pt is damaged"):
        read(checksums)
    with pytest.raises(CheckpointError, match="is damaged"):
        read([])


@pytest.mark.parametrize("borders", [[], [0, 1], [777, 777, 4999]])
def test_parts_have_the_checksum_of_the_whole(borders: list[int]) -> None:
    """However data is cut, the checksums of its parts combine to that of the whole; empty parts count for nothing."""
    data, crc = np.random.default_rng(0).integers(0, 256, 5000, np.uint8), 0
    for begin, end in zip([0, *borders], [*borders, len(data)], strict=True):
        part = data[begin:end]
        crc = crc32c_of_both(crc, native.crc32c(part.ctypes.data, len(part), 0), len(part))
    assert crc == native.crc32c(data.ctypes.data, len(data), 0)
