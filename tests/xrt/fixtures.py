"""Emulated SmartSSDs for tests of any folder: import the fixtures into its ``conftest.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

__all__ = ["emulated_cards", "emulated_cards_of_process", "pyxrt"]


@pytest.fixture(scope="session")
def emulated_cards_of_process() -> EmulatedCards:
    """The cards of this process; built first, where that is not done yet."""
    return EmulatedCards(build())


@pytest.fixture
def emulated_cards(emulated_cards_of_process: EmulatedCards) -> Iterator[EmulatedCards]:
    """Two emulated cards without faults. A test that uses them is marked by ``RunIf(xrt=True)``."""
    emulated_cards_of_process.reset()
    yield emulated_cards_of_process
    emulated_cards_of_process.reset()


@pytest.fixture
def pyxrt(emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``import pyxrt`` finds the system's, or ours where it has none, and the emulated cards through it."""
    from tests.xrt.pyxrt import load

    monkeypatch.setitem(sys.modules, "pyxrt", load())
    return load()
