"""Which device updates when several ranks share cards: all choose alike, and each card is tested once."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import (
    ConfigError,
    DeviceError,
    TransferConfig,
)
from lightning_smartinfinity.devices.smartssd import CardSetup, find_cards
from lightning_smartinfinity.zero3.ranks import collectives
from lightning_smartinfinity.zero3.setup import update_device
from lightning_smartinfinity.zero3.setup.update_device import choose_update_device
from tests.helpers.runif import RunIf
from tests.xrt.cards import EmulatedCards
from tests.xrt.self_tests import offload

pytestmark = RunIf(xrt=True)


def test_cards_whose_memory_is_too_small_for_several_ranks(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory that each rank may take of a card decides."""
    monkeypatch.setattr(update_device, "gather", lambda value, group: [value] * 40)
    asked = offload(tmp_path, emulated_cards, transfer=TransferConfig(num_buffers=2))
    assert choose_update_device(asked, optimizer="Adam").cards is None
    assert "each of 40 processes may take" in caplog.text


CARD, OTHER_CARD = "0000:42:00.1", "0000:43:00.1"


def reports(*builds: str, machine: str = "one", card: str = CARD) -> list[update_device._Report]:
    return [update_device._Report(machine, "host", 1, (card,), build, None) for build in builds]


def test_ranks_on_one_card() -> None:
    """Ranks on one card share its memory evenly and have to load one xclbin; other cards may have another."""
    assert update_device._sharers(reports("x", "x", "x")) == 3
    assert update_device._sharers([*reports("x", "x"), *reports("y", machine="two")]) == 2
    assert update_device._disagreement([*reports("x", "x"), *reports("y", machine="two")]) is None
    assert update_device._disagreement([*reports("x", "x"), *reports("y", card=OTHER_CARD)]) is None
    error = update_device._disagreement([*reports("x", "y"), *reports("z", card=OTHER_CARD)])
    assert isinstance(error, ConfigError) and f"same card {CARD}: x, y." in error.problem


def beside(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let another rank report what this one does, with changes, because processes do not share emulated cards."""
    monkeypatch.setattr(update_device, "gather", lambda value, group: [value, value._replace(**changes)])
    # What this rank raises is what all raise.
    monkeypatch.setattr(collectives, "gather", lambda value, group: [value, value])


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_another_rank_on_the_same_cards(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Each rank takes half of the cards' memory, or all if the other one is on another machine or other cards."""
    asked = offload(tmp_path, emulated_cards, wanted)
    shares = []
    for changes in ({}, {"machine": "another"}, {"cards": ("7", "8")}, {"cards": ("1", "2")}):
        beside(monkeypatch, **changes)
        chosen = choose_update_device(asked, optimizer="Adam").cards
        assert chosen is not None
        shares.append(chosen.sharers)
    assert shares == [2, 1, 1, 2]


def test_another_rank_on_cards_of_unknown_memory(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an unknown size is unknown, so every rank raises, or the host updates."""

    def find(*arguments: Any) -> CardSetup:
        setup = find_cards(*arguments)
        return replace(setup, xclbin=setup.xclbin._replace(memory_bytes=None))

    monkeypatch.setattr(update_device, "find_cards", find)
    beside(monkeypatch)
    assert choose_update_device(offload(tmp_path, emulated_cards, "auto"), optimizer="Adam").cards is None
    with pytest.raises(DeviceError, match=r"2 processes share a card, .* does not tell how much memory"):
        choose_update_device(offload(tmp_path, emulated_cards, "smartssd"), optimizer="Adam")
    beside(monkeypatch, machine="another")
    assert choose_update_device(offload(tmp_path, emulated_cards, "smartssd"), optimizer="Adam").cards is not None


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_one_rank_tests_a_card_that_several_share(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Only the lowest rank that has a card tests it."""
    runs = []
    for changes in ({}, {"process": 0}, {"process": 0, "cards": ("1",)}, {"process": 0, "machine": "another"}):
        monkeypatch.setattr(update_device, "gather", lambda value, group, of=changes: [value._replace(**of), value])
        monkeypatch.setattr(collectives, "gather", lambda value, group: [value, value])
        emulated_cards.reset()
        assert choose_update_device(offload(tmp_path, emulated_cards, wanted), optimizer="Adam").cards is not None
        runs.append([emulated_cards.counter("runs_completed", card) > 0 for card in range(2)])
    assert runs == [[True, True], [False, False], [True, False], [True, True]]


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_a_card_that_fails_the_test_of_another_rank(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wanted: str,
) -> None:
    """This rank does not use the card, and has not tested it itself."""
    failure, rounds = DeviceError("The card there computes nonsense.", "Replace it."), count()

    def gathered(value: Any, group: Any) -> list[Any]:
        return [value._replace(process=0, error=failure if next(rounds) else None), value]

    monkeypatch.setattr(update_device, "gather", gathered)
    monkeypatch.setattr(collectives, "gather", lambda value, group: [(failure, "the other host"), value])
    asked = offload(tmp_path, emulated_cards, wanted)
    if wanted == "smartssd":
        with pytest.raises(DeviceError, match="nonsense"):
            choose_update_device(asked, optimizer="Adam")
    else:
        assert choose_update_device(asked, optimizer="Adam").cards is None
        assert "nonsense" in caplog.text
    assert emulated_cards.counter("runs_begun") == 0


def test_another_rank_with_another_xclbin(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two xclbins on one card are refused, or the host updates: the second load would remove the first's kernels."""
    beside(monkeypatch, build="11111111-1111-1111-1111-111111111111")
    with pytest.raises(ConfigError, match=r"different xclbins.*11111111-.*Name one xclbin"):
        choose_update_device(offload(tmp_path, emulated_cards, "smartssd"), optimizer="Adam")
    assert choose_update_device(offload(tmp_path, emulated_cards), optimizer="Adam").cards is None
    assert "different xclbins" in caplog.text
    beside(monkeypatch, build="11111111-1111-1111-1111-111111111111", machine="another")
    assert choose_update_device(offload(tmp_path, emulated_cards), optimizer="Adam").cards is not None


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_another_rank_without_cards(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wanted: str,
) -> None:
    """If one rank has no cards, no rank uses them: all use the host, or all raise that rank's error."""
    failure = DeviceError("The card there is on fire.", "Call somebody.")
    monkeypatch.setattr(collectives, "gather", lambda value, group: [value, (failure, "the other host")])
    monkeypatch.setattr(update_device, "gather", lambda value, group: [value, value._replace(error=failure)])
    asked = offload(tmp_path, emulated_cards, wanted)
    if wanted == "smartssd":
        with pytest.raises(DeviceError, match="on fire"):
            choose_update_device(asked, optimizer="Adam")
        return
    assert choose_update_device(asked, optimizer="Adam").cards is None
    assert "on fire" in caplog.text
