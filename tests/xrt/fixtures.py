"""Emulated SmartSSDs for tests of any folder: import the fixtures into its ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

__all__ = ["emulated_cards", "emulated_cards_of_process"]


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
