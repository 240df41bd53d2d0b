"""Holds a storage folder until a line arrives on standard input: ``python -m tests.training.holder FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_smartinfinity import SmartInfinityStrategy
from tests.helpers.models import LitTiny, Recipe
from tests.training.test_bad_input import fit


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = SmartInfinityStrategy(folder)
    fit(LitTiny(Recipe()), strategy, folder.parent / "holder")
    sys.stdout.write("HOLDING\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    main()
