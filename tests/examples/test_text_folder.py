from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

Example = Callable[[str], ModuleType]


def write(folder: Path, **texts: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


def test_held_out_files_are_not_trained_on(example: Example, tmp_path: Path) -> None:
    """Every file is on exactly one side."""
    write(tmp_path, **{f"file{index}": chr(65 + index) * 50 for index in range(26)})
    data = example("text_folder").TextFolder(str(tmp_path), block_size=8)
    data.setup("fit")
    train, held_out = (set(windows.bytes.tolist()) for windows in (data.train_windows, data.val_windows))
    assert len(held_out) == 2
    assert train | held_out == set(range(65, 91))
    assert not train & held_out


def test_windows_cover_the_text(example: Example, tmp_path: Path) -> None:
    """Each window's last byte is the next one's first, so that every byte but the first is predicted once."""
    write(tmp_path, a="0123456789")
    windows = example("text_folder").Windows([tmp_path / "a.py"], 3, 1000)
    assert [bytes(windows[index].tolist()) for index in range(len(windows))] == [b"0123", b"3456", b"6789"]


def test_no_more_than_asked_for(example: Example, tmp_path: Path) -> None:
    """Reading stops at ``max_bytes``."""
    write(tmp_path, a="x" * 600, b="y" * 600)
    read = example("text_folder").read_bytes([tmp_path / "a.py", tmp_path / "b.py"], 1000)
    assert bytes(read.tolist()) == b"x" * 600 + b"y" * 400


def test_standard_library(example: Example) -> None:
    """The default folder has text on every machine with Python, without tests and installed packages."""
    text_folder = example("text_folder")
    files = text_folder.find_files(text_folder.TextFolder().folder, "*.py")
    assert len(files) > 100
    assert not any({"site-packages", "test"} & set(file.parts[-3:-1]) for file in files)


def test_sampler_goes_on_where_it_stopped(example: Example) -> None:
    """A sampler started later continues the order, also past the end of a round."""
    sampler = example("text_folder").EndlessSampler
    whole = list(islice(sampler(7, seed=3, rank=0, num_ranks=1, start=0), 30))
    for start in (0, 5, 7, 16):
        assert list(islice(sampler(7, seed=3, rank=0, num_ranks=1, start=start), 10)) == whole[start : start + 10]
    assert sorted(whole[:7]) == sorted(whole[7:14]) == list(range(7))
    assert whole[:7] != whole[7:14]


def test_ranks_share_the_windows(example: Example) -> None:
    """Two ranks together see the windows that one rank would see."""
    sampler = example("text_folder").EndlessSampler
    one = list(islice(sampler(8, seed=0, rank=0, num_ranks=1, start=0), 16))
    first, second = (list(islice(sampler(8, seed=0, rank=rank, num_ranks=2, start=0), 8)) for rank in (0, 1))
    assert [window for pair in zip(first, second, strict=True) for window in pair] == one


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_as_many_held_out_windows_on_every_rank(example: Example, tmp_path: Path, world_size: int) -> None:
    """Every rank has the same number of windows for any size of the text.

    Ranks that validate with ZeRO-3 wait for each other.
    """
    write(tmp_path, a="x" * 100, b="y" * 100)
    data = example("text_folder").TextFolder(str(tmp_path), block_size=20, batch_size=2, num_val_windows=10)
    data.setup("fit")
    chosen = []
    for rank in range(world_size):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
        chosen.append(list(data.val_dataloader().sampler))
    assert len({len(one) for one in chosen}) == 1
    assert len({window for one in chosen for window in one}) == world_size * len(chosen[0])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, r"0 files like '\*\.py'"),
        ({"a": "text"}, r"1 files like"),
        ({"a": "x" * 8, "b": "y" * 8}, r"too little text for windows of 129 bytes"),
    ],
)
def test_too_little_text(example: Example, tmp_path: Path, texts: dict[str, str], message: str) -> None:
    """The error says what there is and what is needed."""
    write(tmp_path / "text", **texts)
    with pytest.raises(ValueError, match=message):
        example("text_folder").TextFolder(str(tmp_path / "text")).setup("fit")


def test_no_folder(example: Example, tmp_path: Path) -> None:
    """The error names the folder."""
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        example("text_folder").TextFolder(str(tmp_path / "nowhere")).setup("fit")


def test_bytes_are_bytes(example: Example, tmp_path: Path) -> None:
    """Text in any encoding gives windows of uint8."""
    write(tmp_path, a="ä€" * 100)
    window = example("text_folder").Windows([tmp_path / "a.py"], 4, 1000)[0]
    assert window.dtype == torch.uint8
    assert bytes(window.tolist()) == "ä€".encode()
