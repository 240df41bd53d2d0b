"""Which device updates: cards are chosen where all ranks can use them, and the reason is told where they cannot.

Processes do not share emulated cards: what another rank reports is made up.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hls.description import design_for
from hls.xclbin import xclbin
from lightning_smartinfinity import ConfigError, DeviceError, SmartInfinityError, SmartSSDConfig, TransferConfig
from lightning_smartinfinity.devices.smartssd import CardSetup, find_cards
from lightning_smartinfinity.settings import CARD_TASKLET_BYTES, HOST_TASKLET_BYTES
from lightning_smartinfinity.settings.smartssd import XCLBIN_VARIABLE
from lightning_smartinfinity.zero3.ranks import collectives
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup import update_device
from lightning_smartinfinity.zero3.setup.update_device import choose_update_device
from tests.helpers.card_runs import OPTIMIZERS, beside_host
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Case
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

Gather = Callable[[Any, Any], list[Any]]


def beside(monkeypatch: pytest.MonkeyPatch, gathered: Gather, raised: Gather = lambda value, group: [value]) -> None:
    """Let the ranks report what this function makes of what this one does, and raise what that function makes of it."""
    monkeypatch.setattr(update_device, "gather", gathered)
    monkeypatch.setattr(collectives, "gather", raised)


def another(**changes: Any) -> Gather:
    """Return a function that lets another rank report what this one does, with changes."""
    return lambda value, group: [value, value._replace(**changes)]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group, unless a test says otherwise."""
    monkeypatch.delenv(XCLBIN_VARIABLE, raising=False)
    beside(monkeypatch, lambda value, group: [value])


class Choosing:
    """Chooses a device for the storage folders of a test."""

    def __init__(self, folder: Path, cards: EmulatedCards) -> None:
        self.folder, self.build = folder, cards.build

    def settings(self, wanted: str, **settings: Any) -> OffloadSettings:
        # A trial of memory fills all of it: tasklets are the smallest without a warning.
        usual = {
            "transfer": TransferConfig(num_buffers=2, tasklet_bytes=16 << 20),
            "smartssd": SmartSSDConfig(xclbin=self.build.xclbin),
        }
        folders = (self.folder / "a", self.folder / "b")
        return OffloadSettings(storage=folders, update_device=wanted, **{**usual, **settings})

    def __call__(self, wanted: str = "auto", *, optimizer: str = "Adam", **settings: Any) -> CardSetup | None:
        return choose_update_device(self.settings(wanted, **settings), optimizer=optimizer).cards


@pytest.fixture
def choose(tmp_path: Path, emulated_cards: EmulatedCards) -> Choosing:
    return Choosing(tmp_path, emulated_cards)


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_cards_are_chosen(choose: Choosing, wanted: str) -> None:
    """Cards are chosen where they can be used; tasklets are then large unless the user says otherwise."""
    usual = choose.settings(wanted, transfer=TransferConfig(num_buffers=2))
    chosen = choose_update_device(usual, optimizer="SGD")
    assert chosen.cards is not None and len(chosen.cards.cards) == 2
    assert chosen.tasklet_bytes == CARD_TASKLET_BYTES >= 16 << 20
    assert replace(chosen, cards=None).tasklet_bytes == HOST_TASKLET_BYTES
    asked = choose.settings(wanted, transfer=TransferConfig(tasklet_bytes=1 << 20, dram_cache_bytes="auto"))
    with (
        pytest.warns(UserWarning, match=r"tasklet_bytes=1048576\) is small for SmartSSDs"),
        pytest.warns(UserWarning, match=r"dram_cache_bytes='auto'\) is ignored"),
    ):
        assert choose_update_device(asked, optimizer="SGD").tasklet_bytes == 1 << 20


def test_an_xclbin_with_the_kernel_of_rmsprop_alone(choose: Choosing, emulated_cards: EmulatedCards) -> None:
    """Cards that have no other kernel pass the self-test, are chosen, and update as the host does."""
    path = choose.folder / "rmsprop.xclbin"
    path.write_bytes(xclbin(design_for("rmsprop")))
    emulated_cards.reset(count=12)
    chosen = choose(optimizer="RMSprop", smartssd=SmartSSDConfig(xclbin=path, devices=[10, 11]))
    assert chosen is not None and chosen.xclbin.kernels == ("rmsprop_update",)
    case = Case(num_devices=2, **OPTIMIZERS["rmsprop"])
    with beside_host(choose.folder, case, path, first=10) as runs:
        for each in runs:
            each.step(0)


Prepare = Callable[[Choosing, EmulatedCards, pytest.MonkeyPatch], dict[str, Any]]


def fire(choose: Choosing, cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let another rank have no cards."""
    failure = DeviceError("The card there is on fire.", "Call somebody.")
    beside(monkeypatch, another(error=failure), lambda value, group: [value, (failure, "the other host")])
    return {}


def nonsense(choose: Choosing, cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let a card fail the test of another rank, so that this rank does not test it itself."""
    failure, rounds = DeviceError("The card there computes nonsense.", "Replace it."), count()
    beside(
        monkeypatch,
        lambda value, group: [value._replace(process=0, error=failure if next(rounds) % 2 else None), value],
        lambda value, group: [(failure, "the other host"), value],
    )
    return {}


def another_xclbin(choose: Choosing, cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    beside(monkeypatch, another(build="11111111-1111"), lambda value, group: [value, value])
    return {}


def unknown_memory(choose: Choosing, cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def find(*arguments: Any) -> CardSetup:
        setup = find_cards(*arguments)
        return replace(setup, xclbin=setup.xclbin._replace(memory_bytes=None))

    monkeypatch.setattr(update_device, "find_cards", find)
    beside(monkeypatch, another(), lambda value, group: [value, value])
    return {}


def broken(choose: Choosing, cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the search fail by an error of any kind, which becomes this rank's report: the others wait for one."""
    monkeypatch.setattr(update_device, "find_cards", mock.Mock(side_effect=ValueError("no such thing")))
    return {}


def no_p2p(choose: Choosing, cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    cards.set("p2p", 0)
    return {}


REFUSED: dict[str, tuple[Prepare, type[SmartInfinityError], str]] = {
    "P2P is off": (no_p2p, DeviceError, "The emulated card 0.*p2p enable"),
    # A card has no room for all kernels, so the error says how to build the missing one.
    "no kernel": (
        lambda choose, *_: {"smartssd": SmartSSDConfig(xclbin=choose.build.probe_xclbin)},
        DeviceError,
        "has no kernel adamw_update; it has probe.*make -C hls xclbin OPTIMIZER=adamw",
    ),
    "no file": (lambda *_: {"smartssd": SmartSSDConfig(xclbin="/not/there")}, ConfigError, "/not/there"),
    "an error of our own": (broken, DeviceError, r"could not be set up: ValueError\('no such thing'\)"),
    # A card cannot see state in the page cache.
    "buffered": (lambda *_: {"transfer": TransferConfig(direct_io="off")}, ConfigError, "page cache"),
    "plain I/O": (lambda *_: {"transfer": TransferConfig(io_engine="plain")}, ConfigError, "page cache"),
    "another rank has none": (fire, DeviceError, "on fire"),
    "a card fails another rank's test": (nonsense, DeviceError, "nonsense"),
    # The second load would remove the first's kernels.
    "another xclbin": (another_xclbin, ConfigError, "different xclbins.*11111111-1111.*Name one xclbin"),
    # Half of an unknown size is unknown.
    "unknown memory": (unknown_memory, DeviceError, "2 processes share a card, .* does not specify how much memory"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_cards_that_cannot_be_used(
    choose: Choosing,
    emulated_cards: EmulatedCards,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    """With "auto" the host updates, and the log says why; with "smartssd" it is an error, on every rank."""
    prepare, error, told = REFUSED[why]
    settings = prepare(choose, emulated_cards, monkeypatch)
    assert choose("auto", **settings) is None
    assert re.search(f"the host updates, since SmartSSDs cannot: .*{told}", caplog.text)
    with pytest.raises(error, match=told):
        choose("smartssd", **settings)
    if prepare is nonsense:
        assert emulated_cards.counter("runs_begun") == 0


def test_host_is_chosen_without_a_search(choose: Choosing, caplog: pytest.LogCaptureFixture) -> None:
    """With "auto" the host updates without an xclbin, and for other formats; the log says why."""
    with caplog.at_level(logging.INFO):
        assert choose(smartssd=None) is choose(state_format="int8") is choose("host") is None
    no_file, no_format = [record.getMessage() for record in caplog.records if record.name.endswith("update_device")]
    assert "no xclbin for SmartSSDs is named" in no_file
    assert "in 'fp32' alone, not 'int8'" in no_format


def test_cards_whose_memory_is_too_small(
    choose: Choosing, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto" the host updates if the cards' memory is too small, and nothing of the trial is left on them.

    The memory that each rank may take of a card decides.
    """
    transfer = TransferConfig(num_buffers=2, tasklet_bytes=32 << 20)
    used = emulated_cards.counter("num_buffers", 1)
    emulated_cards.set("dram_mib", 64, card=1)
    assert choose(transfer=transfer) is None
    assert "The emulated card 1" in caplog.text and "tasklet_bytes=" in caplog.text
    assert emulated_cards.counter("num_buffers", 1) == used
    emulated_cards.reset()
    beside(monkeypatch, lambda value, group: [value] * 40)
    assert choose(transfer=TransferConfig(num_buffers=2)) is None
    assert "each of 40 processes may take" in caplog.text


@pytest.mark.parametrize(
    ("gradient", "parameter", "mib"),
    long_but([(4, 4, 107), (2, 2, 86)], [(4, 4, 107), (4, 2, 97), (2, 4, 97), (2, 2, 86)]),
)
def test_memory_for_the_types_of_gradients_and_parameters(
    choose: Choosing, emulated_cards: EmulatedCards, gradient: int, parameter: int, mib: int
) -> None:
    """The trial counts gradients and parameters of their types beside two tasklets of 32 MiB of state."""
    settings = {"gradient_itemsize": gradient, "parameter_itemsize": parameter}
    transfer = TransferConfig(num_buffers=2, tasklet_bytes=32 << 20)
    emulated_cards.set("dram_mib", mib)
    assert choose(transfer=transfer, **settings) is not None
    emulated_cards.set("dram_mib", mib - 1)
    assert choose(transfer=transfer, **settings) is None


@pytest.mark.parametrize(("optimizer", "largest"), [("Adam", 12 << 29), ("SGD", 8 << 29)])
def test_tasklets_that_no_kernel_works(choose: Choosing, optimizer: str, largest: int) -> None:
    """Tasklets that are too large are refused before anything is written; the error gives the largest size."""
    with pytest.raises(ConfigError, match=f"too large for SmartSSDs.*pass {largest} at most"):
        choose("smartssd", optimizer=optimizer, transfer=TransferConfig(tasklet_bytes=2 * largest))
    assert list(choose.folder.iterdir()) == []
    assert choose("smartssd", optimizer=optimizer, transfer=TransferConfig(tasklet_bytes=largest)) is not None


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_another_rank(
    choose: Choosing, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Each rank takes half of the cards' memory, or all if the other one is on another machine or other cards.

    Only the lowest rank that has a card tests it.
    """
    for changes, sharers, tested in (
        ({}, 2, [True, True]),
        ({"process": 0}, 2, [False, False]),
        ({"process": 0, "cards": ("1", "2")}, 2, [True, False]),
        ({"process": 0, "cards": ("7", "8")}, 1, [True, True]),
        ({"process": 0, "machine": "another", "build": "1"}, 1, [True, True]),
    ):
        beside(
            monkeypatch, lambda value, group, of=changes: [value._replace(**of), value], lambda value, group: [value]
        )
        emulated_cards.reset()
        chosen = choose(wanted)
        assert chosen is not None and chosen.sharers == sharers
        assert [emulated_cards.counter("runs_completed", card) > 0 for card in range(2)] == tested
