"""Output that cannot be written causes no traceback in any command."""

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
    """The command says why with status 1, or silently gives a shell's status if the reader is gone."""
    stream = output()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(command) == status
    assert sys.stdout is stream
    if stream is not None and not stream.closed:
        stream.close()
    assert capsys.readouterr().err == (f"smart-infinity: the output cannot be written: {reason}.\n" if reason else "")


def test_nowhere_to_say_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If neither stdout nor stderr works, the status still reports the failure."""
    for stream in (None, full(1)):
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(FEW) == 1
        assert main([*FEW, "--plot", str(tmp_path / "none" / "steps.svg")]) == 1


def test_errors_of_other_files_are_not_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another file is not reported as an error of the output."""

    def failing(options: argparse.Namespace) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("lightning_smartinfinity.cli.simulation.command.run", failing)
    with pytest.raises(BrokenPipeError):
        main(FEW)
