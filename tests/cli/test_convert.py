"""The command ``smart-infinity convert``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.common import progress
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.waiting import PROCESS_LIMIT
from tests.pipeline.harness import Case
from tests.pipeline.test_convert import kept


def convert(folder: Path, *more: str) -> int:
    return main(["convert", str(folder / "disk0"), "--into", str(folder / "new"), *more])


def test_converts_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new state has the requested format and is kept. Progress goes to stderr, the result to stdout."""
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    for rank in range(2):
        kept(tmp_path, Case(keep=True, rank=rank))
    assert convert(tmp_path, "--state-format", "int8") == 0
    said = capsys.readouterr()
    assert said.out == f"Converted the state of 2 ranks to int8: {tmp_path / 'new'}\n"
    for rank in range(2):
        assert f"Converting the state of rank {rank}: 100%" in said.err
    manifest = json.loads((tmp_path / "new/default/rank-00001/manifest.json").read_text())
    assert (manifest["state_format"], manifest["keep"]) == ("int8", True)


def test_one_rank_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    kept(tmp_path, Case())
    assert convert(tmp_path, "--state-format", "bf16", "--rank", "0", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_a_size_of_tasklets_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A size may have its unit. What is no size ends in an error that names it."""
    kept(tmp_path, Case())
    assert convert(tmp_path, "--state-format", "bf16", "--tasklet-bytes", "64 slices") == 1
    assert "tasklet_bytes='64 slices'" in capsys.readouterr().err
    assert convert(tmp_path, "--state-format", "bf16", "--tasklet-bytes", "64KiB") == 0


def test_an_error_ends_in_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what failed and what to do, without a traceback."""
    assert convert(tmp_path, "--state-format", "bf16") == 1
    said = capsys.readouterr().err
    assert said.startswith("smart-infinity: Looking for optimizer state in") and said.count("\n") == 1
    assert "choose another folder" in said


def test_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends the command with a shell's status."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_smartinfinity.pipeline.state.convert.convert_store", interrupt)
    assert convert(tmp_path, "--state-format", "bf16") == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convert", "a"],
        ["convert", "a", "--into", "b", "--state-format", "int2"],
        ["convert", "a", "--into", "s3://bucket/b", "--state-format", "bf16"],
    ],
)
def test_what_argparse_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A missing command, a missing destination, an unknown format or a URL prints the usage and gives status 2."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: smart-infinity" in capsys.readouterr().err


HELP = """
import runpy, sys
sys.argv = ["", "convert", "--help"]
try:
    runpy.run_module("lightning_smartinfinity.cli", run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


def test_help_without_torch() -> None:
    """``python -m lightning_smartinfinity.cli`` is the command, and its help does not import torch."""
    done = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, env=fresh_environment(), timeout=PROCESS_LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert "--state-format {fp32,bf16,int8,int8_remainder}" in done.stdout
    assert done.stdout.endswith("False\n")
