"""Flipped bits in exports, exports that users changed, and exports without checksums."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_smartinfinity import native
from lightning_smartinfinity.cli.main import main
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import CheckpointError, UnsupportedError
from lightning_smartinfinity.export import checksums
from lightning_smartinfinity.export.checksums import CHECKSUMS_NAME, read_checksums
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.export.pretrained import OriginalWeights
from lightning_smartinfinity.export.scrub import scrub_export
from lightning_smartinfinity.zero3.checkpoints.formats import part_checksums, sealed_json, whole_file
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import PartChecksums
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import DAMAGE
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.whole_file import CHECKSUMS_KEY, load_verified
from tests.export.models import Trained
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit_behind

Train = Callable[[str], Trained]
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


def flipped(content: bytes, generator: random.Random) -> bytes:
    """Flip a bit, half of the time in the first KiB, where names, shapes and dtypes are."""
    at = generator.randrange(min(len(content), generator.choice((1024, len(content)))))
    return content[:at] + bytes([content[at] ^ 1 << generator.randrange(8)]) + content[at + 1 :]


@pytest.mark.parametrize("tries", [12, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("to", ["safetensors", "Lightning"])
def test_flipped_bits(to: str, tries: int, folder: Path, trained: Train, tmp_path: Path, attack: Attack) -> None:
    """In headers, tensors, the index and the checksums, of a folder or a file: none is read silently.

    A scrub reports each that is refused.
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
    expected, refused = load(), 0
    for number in range(tries):
        file = files[number % len(files)]
        whole = file.read_bytes()
        file.write_bytes(flipped(whole, random.Random(number)))
        try:
            found = load()
        except (CheckpointError, *DAMAGE):
            refused += 1
            assert scrub(show=hidden).damaged, (file.name, number)
        else:
            assert same(found, expected), (file.name, number)
        file.write_bytes(whole)
    assert refused > 0.8 * tries  # all but spaces of the JSON, padding, times and the like
    outcome = "an error before a value is used, or nothing that is read changes"
    attack(f"bit flip in an export to {to}", tries=tries, outcome=outcome)


def test_a_file_that_was_changed(trained: Train, tmp_path: Path) -> None:
    """A file for Lightning whose weights were changed and saved by torch loads, unless a bit flips then.

    A flipped bit is found, too, if the loading function returns less than the file holds.
    """
    file = tmp_path / "lit.ckpt"
    export_checkpoint(trained("llama").checkpoint, file, ExportSettings(to="lightning"))
    content = torch.load(file)
    assert CHECKSUMS_KEY not in load_verified(torch.load, file)
    name = "inner.model.lm_head.weight"
    flipped = Path(shutil.copy(file, tmp_path / "flipped.ckpt"))
    flip_bit_behind(content["state_dict"][name].numpy().tobytes()[:64], flipped)
    for part in ("state_dict", CHECKSUMS_KEY):
        with pytest.raises(CheckpointError, match=r"flipped\.ckpt is damaged: Bad CRC-32"):
            load_verified(lambda path, part=part, **_: {part: torch.load(path)[part]}, flipped)
    with pytest.raises(CheckpointError, match=r"flipped\.ckpt is damaged: Bad CRC-32"):
        load_verified(lambda path, **_: list(torch.load(path).items()), flipped)
    content["state_dict"][name] += 1
    del content["state_dict"]["scale"]
    torch.save(content, file)
    assert torch.equal(load_verified(torch.load, file)["state_dict"][name], content["state_dict"][name])
    flip_bit_behind(content["state_dict"][name].numpy().tobytes()[:64], file)
    with pytest.raises(CheckpointError, match=r"lit\.ckpt is damaged: Bad CRC-32"):
        load_verified(torch.load, file)


# ---- what users do with exports


def test_an_export_that_was_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of another tool are refused with the remedy, which works; another configuration is the user's affair."""
    expected = weights_of(folder)
    (folder / "config.json").write_text("{}")
    assert main(["scrub", str(folder), "--quiet"]) == 0
    assert capsys.readouterr().out.endswith("Whole.\n")

    changed = shards_of(folder)[0]
    (name, *_), others = load_file(changed), expected
    save_file({**load_file(changed), name: others[name] + 1}, changed)
    with pytest.raises(CheckpointError, match=f"{changed.name} .*another program.*delete .*{CHECKSUMS_NAME}"):
        read(folder, expected)
    assert main(["scrub", str(folder), "--quiet"]) == 1
    assert changed.name in capsys.readouterr().out

    (folder / CHECKSUMS_NAME).unlink()
    with pytest.warns(UserWarning, match=f"has no {CHECKSUMS_NAME}") as warned:
        found = read(folder, expected)
    assert len(warned) == 1
    assert torch.equal(found[name], others[name] + 1)
    assert main(["scrub", str(folder), "--quiet"]) == 2
    assert f"there is no {CHECKSUMS_NAME}" in capsys.readouterr().err


def test_files_of_an_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scrub reads one file, and names files that are missing, cut short or of another origin."""
    first, second, *_ = shards_of(folder)
    assert main(["scrub", str(first), "--quiet"]) == 0
    shutil.copy(first, folder / "adapter.safetensors")
    assert main(["scrub", str(folder), "--quiet"]) == 2
    assert "adapter.safetensors has no checksums" in capsys.readouterr().err
    second.write_bytes(second.read_bytes()[:-1])
    (folder / INDEX).unlink()
    assert main(["scrub", str(folder), "--quiet"]) == 1
    said = capsys.readouterr().out
    assert f"{second} has " in said and f"{folder / INDEX} is missing" in said
    alone = shutil.copy(first, tmp_path / "alone.safetensors")
    assert main(["scrub", str(alone), "--quiet"]) == 2


def test_checksums_of_a_newer_version(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused in words, and not called damaged. Other content is damage."""
    content = json.loads((folder / CHECKSUMS_NAME).read_text())
    del content["crc32c"]
    content["version"] += 1
    (folder / CHECKSUMS_NAME).write_text(json.dumps({**content, "crc32c": sealed_json._seal(content)}))
    with pytest.raises(UnsupportedError, match=r"a newer version .* which reads 1\. Use version .* delete"):
        read_checksums(folder)
    assert main(["scrub", str(folder), "--quiet"]) == 2
    (folder / CHECKSUMS_NAME).write_text("[1]")
    with pytest.raises(CheckpointError, match="is damaged: its content is not what this package writes"):
        read_checksums(folder)


def test_files_of_torch_without_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        assert main(["scrub", str(tmp_path / name), "--quiet"]) == 2
        assert "has no checksums" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_verified(torch.load, tmp_path / "with.pt")
    assert main(["scrub", str(tmp_path / "with.pt"), "--quiet"]) == 0
    (tmp_path / "with.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"with\.pt is damaged: it is empty"):
        load_verified(torch.load, tmp_path / "with.pt")
    assert main(["scrub", str(tmp_path / "with.pt"), "--quiet"]) == 1


# ---- arithmetic


def test_checksums_of_pieces_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the blocks, computed at once."""
    small_blocks(monkeypatch, 64)
    generator = np.random.default_rng(0)
    for nbytes in (0, 1, 63, 64, 65, 500):
        content = generator.integers(0, 256, nbytes, np.uint8)
        edges = np.unique([0, nbytes, *generator.integers(0, nbytes + 1, 12)])
        pieces = list(pairwise(edges))
        generator.shuffle(pieces)
        found = PartChecksums(nbytes)
        for begin, end in pieces:
            found.add(int(begin), content[begin:end])
        blocks = [content[at : at + 64].copy() for at in range(0, nbytes, 64)]
        assert found.values() == [native.crc32c(block.ctypes.data, block.nbytes) for block in blocks]
