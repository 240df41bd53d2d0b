"""Output that cannot be written: no traceback, whichever the command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.cli import main

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
    """Says why, with status 1; nothing where the reader has gone, with a shell's status for it. Exit fails no more."""
    stream = output()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(command) == status
    assert sys.stdout is stream
    if stream is not None and not stream.closed:
        stream.close()
    assert capsys.readouterr().err == (f"smart-infinity: the output cannot be written: {reason}.\n" if reason else "")


def test_nowhere_to_say_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither output: the status still tells."""
    for stream in (None, full(1)):
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(FEW) == 1
        assert main([*FEW, "--plot", str(tmp_path / "none" / "steps.svg")]) == 1


def test_errors_of_other_files_are_not_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not said to be."""

    def failing(options: argparse.Namespace) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("lightning_smartinfinity.cli.simulate._run", failing)
    with pytest.raises(BrokenPipeError):
        main(FEW)
