"""Where an export may be written, the bytes of its files, and their checksums."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from lightning_smartinfinity import native
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import (
    CheckpointError,
    ConfigError,
    SmartInfinityError,
    StorageError,
    StorageLockedError,
    UnsupportedError,
)
from lightning_smartinfinity.export import checksums
from lightning_smartinfinity.export.checksums import CHECKSUMS_NAME, read_checksums
from lightning_smartinfinity.export.destination import require_room, staged
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.export.from_training import save_module
from lightning_smartinfinity.export.pretrained import OriginalWeights
from lightning_smartinfinity.export.safetensors_file import SafetensorsFile
from lightning_smartinfinity.export.scrub import scrub_export
from lightning_smartinfinity.storage.folders.replacement import beside
from lightning_smartinfinity.storage.folders.staging_folder import mark_of
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.checkpoints.formats import part_checksums, sealed_json, tensor_file, whole_file
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import PartChecksums
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import DAMAGE
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import TensorSpec
from lightning_smartinfinity.zero3.checkpoints.formats.whole_file import CHECKSUMS_KEY, load_verified
from tests.cli.conftest import Cli
from tests.export.models import Trained, files_of
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit_behind
from tests.helpers.silent_disk import SECONDS, SilentDisk, gives_up

Train = Callable[[str], Trained]
LINEAR = torch.nn.Linear(2, 2)


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
    assert files_of(out) == {"weights": b"first"} and [path.name for path in tmp_path.iterdir()] == ["out"]


def write_both(new: Path, out: Path) -> None:
    new.write_text("exported")
    out.write_text("mine")


def test_what_another_program_puts_there_meanwhile_stays(tmp_path: Path) -> None:
    """An export looks once more before it replaces anything."""
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="replaces nothing"), staged(out) as folder:
        write_both(folder, out)
    assert out.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("keeps_others", [False, True])
def test_what_lies_where_an_export_is_written_stays(keeps_others: bool, tmp_path: Path) -> None:
    """A folder that has the hidden name by chance is refused, with the name of a file in it."""
    precious = beside(tmp_path / "out") / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("precious")
    with (
        pytest.raises(CheckpointError, match=f"{precious} is in the way"),
        staged(tmp_path / "out", keeps_others=keeps_others),
    ):
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
    for save in (partial(export_checkpoint, checkpoint, settings=ExportSettings()), partial(save_module, LINEAR)):
        with pytest.raises(SmartInfinityError, match=message):
            save(Path(name))
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "link"]


SIZES = ["0", "0GB", "-1", "-5GB", "x", "", "nan", "nanGB", "inf", "infGB", "5XB", "GB", "\u0665GB"]


@pytest.fixture
def process_group() -> Iterator[None]:
    """Have a process group of one rank, as every training does."""
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if own:
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("size", [*SIZES, 0, -1, True, 1.5])
def test_a_size_of_files_that_is_none(size: Any, tmp_path: Path, cli: Cli) -> None:
    """Both ways to save and the command name the value, and write nothing."""
    for save in (ExportSettings, partial(save_module, LINEAR, tmp_path / "out")):
        with pytest.raises(ConfigError, match=re.escape(f"max_shard_size={size!r}")):
            save(max_shard_size=size)
    if isinstance(size, str):
        assert repr(size) in cli("export", tmp_path, tmp_path / "out", f"--max-shard-size={size}", status=1).err
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
    file.close_incomplete()


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


# ---- flipped bits in exports, exports that users changed, and exports without checksums


INDEX = "model.safetensors.index.json"


def small_blocks(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Make blocks that are smaller than the weights of tests."""
    for module in (checksums, part_checksums, whole_file):
        monkeypatch.setattr(module, "BLOCK_BYTES", nbytes)


@pytest.fixture
def folder(trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an exported folder of several files, with small blocks."""
    checkpoint = trained("llama").checkpoint  # with its own exports, which have blocks as usual
    small_blocks(monkeypatch, 1024)
    export_checkpoint(checkpoint, tmp_path / "out", ExportSettings(max_shard_size="20KB"))
    return tmp_path / "out"


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights by safetensors' own function."""
    return {name: value for file in shards_of(folder) for name, value in load_file(file).items()}


def read(folder: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read weights of these names and shapes as an export does that takes them from --model."""
    source, found = OriginalWeights(folder, prefix="none"), {}
    for name, value in expected.items():
        spec = source.spec(name, value.shape)
        flat = torch.empty(spec.numel, dtype=spec.dtype)
        for begin, values in source.windows(name, spec):
            flat[begin : begin + len(values)] = values
        found[name] = flat.reshape(spec.shape)
    return found


def same(first: Any, second: Any) -> bool:
    """Return whether two nested values are equal, tensors with their dtypes and shapes."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    return bool(first == second)


# ---- flipped bits


def bit_in(content: bytes, generator: random.Random) -> int:
    """Return the index of a bit, half of the time in the first KiB, where names, shapes and dtypes are."""
    return generator.randrange(8 * min(len(content), generator.choice((1024, len(content)))))


@pytest.mark.parametrize("tries", [12, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("to", ["safetensors", "Lightning"])
def test_flipped_bits(to: str, tries: int, folder: Path, trained: Train, tmp_path: Path, attack: Attack) -> None:
    """In headers, tensors, the index and the checksums, of a folder or a file: none is read silently.

    Nor is any in the directory of a file's records; the quick test flips each fourth bit of one entry. A scrub reports
    each that is refused.
    """
    files, load = (
        [*shards_of(folder), folder / INDEX, folder / CHECKSUMS_NAME],
        partial(read, folder, weights_of(folder)),
    )
    scrub: Callable[..., Any] = partial(scrub_export, folder)
    if to == "Lightning":
        files = [tmp_path / "lit.ckpt"]
        export_checkpoint(trained("llama").checkpoint, files[0], ExportSettings(to="lightning"))
        load, scrub = partial(load_verified, torch.load, files[0]), partial(scrub_checkpoint, files[0])
    expected = load()

    def is_refused(file: Path, bit: int) -> bool:
        whole = file.read_bytes()
        at = bit // 8
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit % 8]) + whole[at + 1 :])
        try:
            assert same(load(), expected), (file.name, bit)
        except (CheckpointError, *DAMAGE):
            assert scrub(show=hidden).damaged, (file.name, bit)
            return True
        finally:
            file.write_bytes(whole)
        return False

    tried = [files[number % len(files)] for number in range(tries)]
    refused = [is_refused(file, bit_in(file.read_bytes(), random.Random(seed))) for seed, file in enumerate(tried)]
    assert sum(refused) > 0.8 * tries  # all but spaces of the JSON, padding, times and the like
    if to == "Lightning":
        places = [place for name, place in tensor_file._directory(files[0])[1].items() if "/data/" in name]
        end, step = (places[1], 4) if tries == 12 else (files[0].stat().st_size, 1)
        for bit in range(8 * places[0], 8 * end, step):
            is_refused(files[0], bit)
    outcome = "an error before a value is used, or nothing that is read changes"
    attack(f"bit flip in an export to {to}", tries=tries, outcome=outcome)


def test_a_file_that_was_changed(trained: Train, tmp_path: Path) -> None:
    """A file for Lightning whose weights were changed and saved by torch loads, unless a bit flips then.

    A flipped bit is found, too, if the loading function returns less than the file holds, or if it is in memory alone.
    Weights that this function casts or changes in another way are not damaged. No weight of a whole file is read twice,
    and the search for weights calls nothing that a file names.
    """
    file, damaged = tmp_path / "lit.ckpt", r"ckpt is damaged: Bad CRC-32"
    export_checkpoint(trained("llama").checkpoint, file, ExportSettings(to="lightning"))
    content = torch.load(file)
    assert CHECKSUMS_KEY not in load_verified(torch.load, file)
    storages = {content["state_dict"][weight].data_ptr() for weight in content[CHECKSUMS_KEY]["names"]}
    later = whole_file._compared_later(file)
    assert len({place.record for place in later.values()}) == len(storages), "weights are read twice"
    name = "inner.model.lm_head.weight"
    flipped = Path(shutil.copy(file, tmp_path / "flipped.ckpt"))
    flip_bit_behind(content["state_dict"][name].numpy().tobytes()[:64], flipped)
    for load in (
        lambda path, **_: {"state_dict": torch.load(path)["state_dict"]},
        lambda path, **_: {CHECKSUMS_KEY: torch.load(path)[CHECKSUMS_KEY]},
        lambda path, **_: list(torch.load(path).items()),
    ):
        with pytest.raises(CheckpointError, match=rf"flipped\.{damaged}"):
            load_verified(load, flipped)
    named = whole_file._Places(io.BytesIO(pickle.dumps([os.getcwd, Path("/")])), folder="").load()
    assert (named[0], type(named[1])) == (whole_file._Inert, whole_file._Inert)
    with pytest.raises(CheckpointError, match=rf"lit\.ckpt was read wrong: '{name}' in memory"):
        load_verified(lambda path, **_: torch.load(flipped), file)
    weight, sums = content["state_dict"][name], content[CHECKSUMS_KEY]
    with pytest.raises(ValueError, match="not contiguous"):  # and no copy of it, which could be larger than the memory
        whole_file._bytes_of(weight[:1, :1].expand(1 << 31, 1 << 31))
    for changed in (weight.to_sparse(), weight.int(), weight.to("meta")):
        state = {**content["state_dict"], name: changed}
        assert load_verified(Mock(return_value={"state_dict": state, CHECKSUMS_KEY: sums}), file)
    assert load_verified(Mock(return_value={**content, CHECKSUMS_KEY: {"newer": 2}}), file)
    content["state_dict"][name] += 1
    del content["state_dict"]["scale"]
    torch.save(content, file)
    assert torch.equal(load_verified(torch.load, file)["state_dict"][name], content["state_dict"][name])
    flip_bit_behind(content["state_dict"][name].numpy().tobytes()[:64], file)
    with pytest.raises(CheckpointError, match=rf"lit\.{damaged}"):
        load_verified(torch.load, file)


# ---- what users do with exports


def test_an_export_that_was_changed(folder: Path, cli: Cli) -> None:
    """Weights of another tool are refused with the remedy, which works; another configuration is the user's affair."""
    expected = weights_of(folder)
    (folder / "config.json").write_text("{}")
    assert cli("scrub", folder, "--quiet").out.endswith("Whole.\n")

    changed = shards_of(folder)[0]
    (name, *_) = load_file(changed)
    save_file({**load_file(changed), name: expected[name] + 1}, changed)
    with pytest.raises(CheckpointError, match=f"{changed.name} .*another program.*delete .*{CHECKSUMS_NAME}"):
        read(folder, expected)
    assert changed.name in cli("scrub", folder, "--quiet", status=1).out

    (folder / CHECKSUMS_NAME).unlink()
    with pytest.warns(UserWarning, match=f"has no {CHECKSUMS_NAME}") as warned:
        found = read(folder, expected)
    assert len(warned) == 1 and torch.equal(found[name], expected[name] + 1)
    assert f"there is no {CHECKSUMS_NAME}" in cli("scrub", folder, "--quiet", status=2).err


def test_files_of_an_export(folder: Path, tmp_path: Path, cli: Cli) -> None:
    """A scrub reads one file, and names files that are missing, cut short or of another origin."""
    first, second, *_ = shards_of(folder)
    cli("scrub", first, "--quiet")
    shutil.copy(first, folder / "adapter.safetensors")
    assert "adapter.safetensors has no checksums" in cli("scrub", folder, "--quiet", status=2).err
    second.write_bytes(second.read_bytes()[:-1])
    (folder / INDEX).unlink()
    said = cli("scrub", folder, "--quiet", status=1).out
    assert f"{second} has " in said and f"{folder / INDEX} is missing" in said
    cli("scrub", shutil.copy(first, tmp_path / "alone.safetensors"), "--quiet", status=2)


def test_checksums_of_a_newer_version(folder: Path, cli: Cli) -> None:
    """They are refused in words, and not called damaged. Other content is damage."""
    content = json.loads((folder / CHECKSUMS_NAME).read_text())
    del content["crc32c"]
    content["version"] += 1
    (folder / CHECKSUMS_NAME).write_text(json.dumps({**content, "crc32c": sealed_json._seal(content)}))
    with pytest.raises(UnsupportedError, match=r"a newer version .* which reads 1\. Use version .* delete"):
        read_checksums(folder)
    cli("scrub", folder, "--quiet", status=2)
    (folder / CHECKSUMS_NAME).write_text("[1]")
    with pytest.raises(CheckpointError, match="is damaged: its content is not what this package writes"):
        read_checksums(folder)


def test_files_of_torch_without_checksums(tmp_path: Path, cli: Cli) -> None:
    """Files of torch's older format and without CRC-32s load with one warning, and have status 2 in a scrub.

    A file that was cut to nothing is damaged.
    """
    weights = {"weight": torch.arange(3.0)}
    torch.save(weights, tmp_path / "older.pt", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "without.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(weights, tmp_path / "with.pt")
    for name in ("older.pt", "without.pt"):
        with pytest.warns(UserWarning, match="has no checksums") as warned:
            assert same(load_verified(torch.load, tmp_path / name), weights)
        assert len(warned) == 1
        assert "has no checksums" in cli("scrub", tmp_path / name, "--quiet", status=2).err
    with warnings.catch_warnings(action="error"):
        load_verified(torch.load, tmp_path / "with.pt")
    cli("scrub", tmp_path / "with.pt", "--quiet")
    (tmp_path / "with.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"with\.pt is damaged: it is empty"):
        load_verified(torch.load, tmp_path / "with.pt")
    cli("scrub", tmp_path / "with.pt", "--quiet", status=1)


# ---- arithmetic


def test_checksums_of_pieces_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the blocks, computed at once."""
    small_blocks(monkeypatch, 64)
    generator = np.random.default_rng(0)
    for nbytes in (0, 1, 63, 64, 65, 500):
        content = generator.integers(0, 256, nbytes, np.uint8)
        pieces = list(pairwise(np.unique([0, nbytes, *generator.integers(0, nbytes + 1, 12)])))
        generator.shuffle(pieces)
        found = PartChecksums(nbytes)
        for begin, end in pieces:
            found.add(int(begin), content[begin:end])
        blocks = [content[at : at + 64].copy() for at in range(0, nbytes, 64)]
        assert found.values() == [native.crc32c(block.ctypes.data, block.nbytes) for block in blocks]
