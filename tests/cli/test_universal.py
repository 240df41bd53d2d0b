"""The command ``smart-infinity universal``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.common import progress
from tests.helpers.universal import save_of_two

SHAPES = [{"a": torch.Size([5])}]
WHOLE = {"a": torch.arange(5.0)}


def test_converts_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress goes to stderr, the result to stdout."""
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    checkpoint = save_of_two(tmp_path / "two.ckpt", SHAPES, WHOLE, {"sum": 1})
    assert main(["universal", str(checkpoint), "--into", str(tmp_path / "new")]) == 0
    said = capsys.readouterr()
    assert said.out == f"Converted {checkpoint} to a universal checkpoint: {tmp_path / 'new'}\n"
    assert "Converting the optimizer state: 100%" in said.err and "40.0/40.0" in said.err
    assert torch.equal(torch.load(tmp_path / "new/zero/a/sum.pt"), WHOLE["a"] + 1)


def test_an_error_ends_in_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what failed and what to do, without a traceback."""
    assert main(["universal", str(tmp_path / "nowhere"), "--into", str(tmp_path / "new"), "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("smart-infinity: The checkpoint") and said.endswith("does not exist. Check the path.\n")


def test_parts_of_two_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts in any order make one checkpoint; one twice, or one alone, is refused, and nothing is written."""
    whole = save_of_two(tmp_path / "a" / "two.ckpt", SHAPES, WHOLE, {"sum": 1})
    part = tmp_path / "b" / "two.ckpt"
    (part / "checkpoint").mkdir(parents=True)
    for file in list((whole / "checkpoint").glob("*zero_pp_rank_1_*")):
        file.rename(part / "checkpoint" / file.name)
    for number, parts in enumerate(([whole, part], [part, whole])):
        into = tmp_path / f"new-{number}"
        assert main(["universal", *map(str, parts), "--into", str(into), "--quiet"]) == 0
        assert torch.equal(torch.load(into / "zero/a/sum.pt"), WHOLE["a"] + 1)
    assert f"Converted {whole}, {part} to a universal checkpoint" in capsys.readouterr().out
    for parts, fault in (([whole], "; 2 saved"), ([whole, whole], "is in .*, too"), ([part, part], "is in .*, too")):
        assert main(["universal", *map(str, parts), "--into", str(tmp_path / "none"), "--quiet"]) == 1
        assert re.search(fault, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "new-0", "new-1"]
