"""Finds the card of each storage folder, or raises an error that explains why there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.devices.smartssd.discovery.cards import (
    Card,
    cards_of,
    emulated_card,
    unusable_node,
    without_driver,
)
from lightning_smartinfinity.devices.smartssd.discovery.p2p import P2PState
from lightning_smartinfinity.devices.smartssd.discovery.pairing import named_cards, pair, require_each_once
from lightning_smartinfinity.devices.smartssd.discovery.runtime import choose_binding, require_runtime, runtime_of
from lightning_smartinfinity.devices.smartssd.discovery.ssds import all_ssds, ssd_of
from lightning_smartinfinity.devices.smartssd.discovery.system import System
from lightning_smartinfinity.devices.smartssd.discovery.xclbin import Xclbin, read_xclbin
from lightning_smartinfinity.errors import ConfigError, DeviceError
from lightning_smartinfinity.settings import SmartSSDConfig

__all__ = ["CardSetup", "find_cards", "paired_cards"]


@dataclass(frozen=True, kw_only=True)
class CardSetup:
    """The cards that update a rank's state, and how to open them.

    Args:
        xclbin: The kernels.
        cards: Card of each storage folder, in the folders' order.
        settings: The user's settings.
        binding: How XRT is called: ``"native"`` or ``"pyxrt"``.
        library: Name or path of XRT's C library, for ``"native"``.
        sharers: Processes on this machine that share each card's memory.
    """

    xclbin: Xclbin
    cards: tuple[Card, ...]
    settings: SmartSSDConfig
    binding: str
    library: str | None = None
    sharers: int = 1


def find_cards(folders: Sequence[Path], settings: SmartSSDConfig, system: System) -> CardSetup:
    """Find the card of every storage folder.

    Args:
        folders: Storage folders, which need not exist yet.
        settings: The user's settings.
        system: This machine.

    Raises:
        ConfigError: No xclbin is named, a card cannot reach a folder, or the pairing is not one to one.
        DeviceError: XRT or a card is unusable.
    """
    xclbin = read_xclbin(settings, system)
    runtime = runtime_of(system)
    require_runtime(runtime)
    binding = choose_binding(settings.binding, runtime)
    cards = paired_cards(folders, settings, system)
    for card in cards:
        _require_usable(system, card)
    return CardSetup(xclbin=xclbin, cards=tuple(cards), settings=settings, binding=binding, library=runtime.library)


def paired_cards(folders: Sequence[Path], settings: SmartSSDConfig, system: System) -> list[Card]:
    """Return the card of each folder, even if it is not usable.

    Raises:
        ConfigError: A card cannot reach a folder, or the pairing is not one to one.
        DeviceError: There is no card.
    """
    names = settings.devices
    if names is not None and len(names) != len(folders):
        raise ConfigError(
            f"SmartSSDConfig(devices={list(names)!r}) names {len(names)} cards for {len(folders)} storage folders.",
            "Name one card for each folder, in the folders' order.",
        )
    if system.emulated:
        return _emulated(folders, names)
    ssds = [ssd_of(system, folder) for folder in folders]
    cards = cards_of(system)
    if not cards:
        raise _no_card(system)
    chosen = pair(ssds, cards, all_ssds(system)) if names is None else named_cards(ssds, cards, names)
    require_each_once([(card.address, folder) for card, folder in zip(chosen, folders, strict=True)], what="card")
    return chosen


def _emulated(folders: Sequence[Path], names: Sequence[str | int] | None) -> list[Card]:
    """Return emulated cards. They have numbers but no PCI path, so any card can be paired with any folder."""
    numbers = range(len(folders)) if names is None else names
    cards = []
    for number in numbers:
        if not re.fullmatch("[0-9]{1,5}", str(number)):
            raise ConfigError(
                f"SmartSSDConfig(devices=[... {number!r} ...]): emulated cards have numbers alone.", "Use 0, 1, ..."
            )
        cards.append(emulated_card(int(number)))
    require_each_once([(card.address, folder) for card, folder in zip(cards, folders, strict=True)], what="card")
    return cards


def _no_card(system: System) -> DeviceError:
    silent = without_driver(system)
    if silent:
        return DeviceError(
            f"XRT's driver xocl does not hold the card {', '.join(silent)}.",
            "Install XRT's drivers, or load: modprobe xocl.",
        )
    return DeviceError("There is no SmartSSD on this machine's PCI bus.", "Use update_device='host'.")


def _require_usable(system: System, card: Card) -> None:
    reason = unusable_node(system, card)
    if reason is not None:
        raise DeviceError(
            f"The {card.label} cannot be opened: {reason}.", "Give this user access to it and log in again."
        )
    # If the driver does not report the state, the self-test finds out.
    if card.p2p.state not in (P2PState.ENABLED, P2PState.UNKNOWN):
        raise DeviceError(
            f"P2P of the {card.label} is {card.p2p.state.value}: its SSD cannot reach its memory.",
            card.p2p.remedy(card.address),
        )
