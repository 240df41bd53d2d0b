"""Runs commands within the process of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_smartinfinity.cli import main

Cli = Callable[..., Any]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """A function that runs a command, asserts its exit status, and returns what it printed: ``out`` and ``err``."""

    def run(*arguments: object, status: int = 0) -> Any:
        capsys.readouterr()
        try:
            ended: object = main([*map(str, arguments)])
        except SystemExit as stopped:  # raised by argparse
            ended = stopped.code
        assert ended == status
        return capsys.readouterr()

    return run
