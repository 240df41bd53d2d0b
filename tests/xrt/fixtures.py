"""Emulated SmartSSDs for tests of any folder: import the fixtures into its ``conftest.py``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest

from lightning_smartinfinity.devices.smartssd import unreturned
from tests.helpers.native_testing import Hold
from tests.helpers.waiting import await_that
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

Holder = Callable[..., Hold]
"""What the fixture ``hold`` returns."""


@pytest.fixture(scope="session")
def emulated_cards_of_process() -> EmulatedCards:
    """The cards of this process, which are built first if necessary."""
    return EmulatedCards(build())


@pytest.fixture
def emulated_cards(emulated_cards_of_process: EmulatedCards) -> Iterator[EmulatedCards]:
    """Two emulated cards without faults. A test that uses them is marked by ``RunIf(xrt=True)``.

    The test must free all memory that it took on these two cards, because another test would lack it.
    """
    cards = emulated_cards_of_process
    cards.reset()
    before = [cards.counter("num_buffers", card) for card in range(2)]
    yield cards
    cards.reset()

    def given_back() -> bool:
        unreturned.close_returned()
        if [cards.counter("num_buffers", card) for card in range(2)] == before:
            return True
        gc.collect()  # the traceback of an error that was raised may hold a buffer
        return False

    await_that(given_back, told=lambda: f"{_left(cards)}; before: {before}")


def _left(cards: EmulatedCards) -> str:
    """Describe what a test has not given back."""
    kept = [f"{card.label}, {'busy' if worker.busy else 'idle'}" for worker, card in unreturned._kept]
    return f"buffers {[cards.counter('num_buffers', card) for card in range(2)]}, kept: {kept}"


@pytest.fixture
def hold(emulated_cards: EmulatedCards) -> Iterator[Holder]:
    """Return a function that makes a hold. It ends with the test, so that the cards of the next test are not busy."""
    with ExitStack() as released:

        def make(*arguments: Any, **where: Any) -> Hold:
            hold = Hold(*arguments, **where)
            released.callback(hold.release)
            return hold

        yield make


@pytest.fixture
def pyxrt(emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that ``import pyxrt`` finds: the system's, or else ours, with the emulated cards behind it."""
    from tests.xrt.pyxrt import load

    monkeypatch.setitem(sys.modules, "pyxrt", load())
    return load()
