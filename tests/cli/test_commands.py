"""The commands ``convert`` and ``universal``, help, and output that cannot be written."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.output import checked_output
from lightning_smartinfinity.common import progress
from tests.cli.conftest import Cli
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.universal import save_of_two
from tests.helpers.waiting import PROCESS_LIMIT
from tests.pipeline.harness import Case
from tests.pipeline.test_convert import kept

ONE_RANK = ["--state-format", "bf16", "--rank", "0", "--quiet"]


def test_converts_and_says_so(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new state has the requested format and is kept. Progress goes to stderr, the result to stdout.

    A size may have its unit.
    """
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    for rank in range(2):
        kept(tmp_path, Case(keep=True, rank=rank))
    convert = ("convert", tmp_path / "disk0", "--into", tmp_path / "new", "--state-format")
    said = cli(*convert, "int8", "--tasklet-bytes", "64KiB")
    assert said.out == f"Converted the state of 2 ranks to int8: {tmp_path / 'new'}\n"
    assert [f"Converting the state of rank {rank}: 100%" in said.err for rank in range(2)] == [True] * 2
    manifest = json.loads((tmp_path / "new/default/rank-00001/manifest.json").read_text())
    assert (manifest["state_format"], manifest["keep"]) == ("int8", True)
    assert cli("convert", tmp_path / "disk0", "--into", tmp_path / "one", *ONE_RANK).err == ""


def test_errors_and_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """The message says what failed and what to do, without a traceback. Ctrl-C ends with a shell's status."""
    convert = ("convert", tmp_path / "disk0", "--into", tmp_path / "new", "--state-format", "bf16")
    said = cli(*convert, status=1).err
    assert said.startswith("smart-infinity: Looking for optimizer state in") and said.count("\n") == 1
    assert "choose another folder" in said
    interrupt = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("lightning_smartinfinity.pipeline.state.convert.convert_store", interrupt)
    assert "interrupted" in cli(*convert, status=130).err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convert", "a"],
        ["convert", "a", "--into", "b", "--state-format", "int2"],
        ["convert", "a", "--into", "s3://bucket/b", "--state-format", "bf16"],
        ["jobs", "a\0b"],
        ["scrub", "a\0b"],
        *(
            [*command.split(), ""]
            for command in ("jobs", "scrub", "convert a --into", "export a", "universal a --into", "selftest")
        ),
    ],
)
def test_what_argparse_refuses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A missing command or destination, an unknown format, a URL, a null byte or an empty path prints the usage.

    The status is 2.
    """
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr().err
    assert "usage: smart-infinity" in said and ("'' names nothing" in said) == ("" in arguments)


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
    assert "--state-format {fp32,bf16,int8,int8_remainder}" in done.stdout and done.stdout.endswith("False\n")


SHAPES = [{"a": torch.Size([5])}]
WHOLE = {"a": torch.arange(5.0)}


def test_parts_of_two_machines(tmp_path: Path, cli: Cli) -> None:
    """The parts in any order make one checkpoint; one twice, or one alone, is refused, and nothing is written."""
    whole = save_of_two(tmp_path / "a" / "two.ckpt", SHAPES, WHOLE, {"sum": 1})
    part = tmp_path / "b" / "two.ckpt"
    (part / "checkpoint").mkdir(parents=True)
    for file in list((whole / "checkpoint").glob("*zero_pp_rank_1_*")):
        file.rename(part / "checkpoint" / file.name)
    for number, parts in enumerate(([whole, part], [part, whole])):
        into = tmp_path / f"new-{number}"
        said = cli("universal", *parts, "--into", into, "--quiet").out
        assert torch.equal(torch.load(into / "zero/a/sum.pt"), WHOLE["a"] + 1)
        assert f"Converted {parts[0]}, {parts[1]} to a universal checkpoint" in said
    for parts, fault in (([whole], "; 2 saved"), ([whole, whole], "is in .*, too"), ([part, part], "is in .*, too")):
        assert re.search(fault, cli("universal", *parts, "--into", tmp_path / "none", "--quiet", status=1).err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "new-0", "new-1"]


FEW = ["simulate", "--parameters", "1e6", "--devices", "1", "--systems", "zero-infinity"]


def full(buffering: int = -1) -> io.TextIOWrapper:
    return open("/dev/full", "w", buffering=buffering)


def broken_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


OUTPUTS: list[tuple[Callable[[], Any], int, str]] = [
    (full, 1, "No space left on device"),
    (lambda: full(1), 1, "No space left on device"),
    (closed, 1, "Bad file descriptor"),
    (lambda: None, 1, "Bad file descriptor"),
    (broken_pipe, 141, ""),
]


@pytest.mark.parametrize("command", [FEW, [*FEW, "--json"], ["simulate", "--help"], ["selftest"]])
@pytest.mark.parametrize(("output", "status", "reason"), OUTPUTS, ids=["full", "lines", "closed", "none", "pipe"])
def test_output_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    output: Callable[[], Any],
    status: int,
    reason: str,
) -> None:
    """The command says why with status 1, or silently gives a shell's status if the reader is gone."""
    stream = output()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(command) == status and sys.stdout is stream
    if stream is not None and not stream.closed:
        stream.close()
    assert capsys.readouterr().err == (f"smart-infinity: the output cannot be written: {reason}.\n" if reason else "")


def test_an_output_that_cannot_hold_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters that the output's encoding lacks are shown by their numbers."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    with checked_output():
        print("ü")
    assert output.getvalue() == b"\\xfc\n"
