"""Pairs SSDs and cards one to one, by their nearest common PCI ancestor."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from lightning_smartinfinity.devices.smartssd.discovery.cards import Card
from lightning_smartinfinity.devices.smartssd.discovery.pci import PciPath, common_ancestors, drawn
from lightning_smartinfinity.devices.smartssd.discovery.ssds import Ssd
from lightning_smartinfinity.errors import ConfigError

__all__ = ["named_cards", "pair", "require_each_once"]

_log = logging.getLogger(__name__)
_REMEDY = "Name the card of each storage folder: SmartSSDConfig(devices=['0000:3d:00.1', ...]); or use the host."


def pair(ssds: Sequence[Ssd], cards: Sequence[Card], controllers: Sequence[PciPath]) -> list[Card]:
    """Return the card nearest to each SSD, except cards nearest to another one of the machine's ``controllers``.

    Raises:
        ConfigError: A card is nearest to several SSDs, or an SSD to several cards or none; the tree is shown.
    """
    require_each_once([(ssd.path.address, ssd.folder) for ssd in ssds], what="SSD")
    known = sorted({*controllers, *(ssd.path for ssd in ssds)}, key=lambda path: path.steps)
    return [_card_beside(ssd, ssds, cards, known) for ssd in ssds]


def named_cards(ssds: Sequence[Ssd], cards: Sequence[Card], names: Sequence[str | int]) -> list[Card]:
    """Return the cards that the user named, one for each SSD; warn if another card is nearer.

    Raises:
        ConfigError: A named card does not exist.
    """
    chosen = [_named(name, cards) for name in names]
    for ssd, card in zip(ssds, chosen, strict=True):
        if card.path not in _nearest(ssd.path, [other.path for other in cards if other.path is not None]):
            _log.warning(
                "SmartSSDConfig(devices=...) pairs %r with %s, which is not nearest to its SSD %s:"
                " data between them may pass the host.",
                str(ssd.folder),
                card.label,
                ssd.path.address,
            )
    return chosen


def require_each_once(used: Sequence[tuple[str, Path]], *, what: str) -> None:
    """Raise if two folders use one device, an ``"SSD"`` or a ``"card"``; ``used`` lists addresses and folders."""
    seen: dict[str, Path] = {}
    for address, folder in used:
        other = seen.setdefault(address, folder)
        if other is not folder:
            raise ConfigError(
                f"The storage folders {str(other)!r} and {str(folder)!r} share one {what} ({address}).",
                "Use one storage folder for each SmartSSD.",
            )


def _card_beside(ssd: Ssd, ssds: Sequence[Ssd], cards: Sequence[Card], controllers: Sequence[PciPath]) -> Card:
    placed = [card.path for card in cards if card.path is not None]
    beside = _nearest(ssd.path, placed)
    if not beside:
        raise _refused(f"No card shares a PCIe switch with {_words(ssd)}.", ssds, cards)
    if len(beside) > 1:
        listed = ", ".join(path.address for path in beside)
        raise _refused(f"Several cards are equally near to {_words(ssd)}: {listed}.", ssds, cards)
    rivals = _nearest(beside[0], controllers)
    if rivals != [ssd.path]:
        listed = ", ".join(path.address for path in rivals)
        raise _refused(f"The card nearest to {_words(ssd)}, {beside[0].address}, belongs to {listed}.", ssds, cards)
    return next(card for card in cards if card.path == beside[0])


def _nearest(path: PciPath, others: Sequence[PciPath]) -> list[PciPath]:
    """Return the paths that share the most ancestors with ``path``; none if no ancestor is shared."""
    shared = [common_ancestors(path, other) for other in others]
    most = max(shared, default=0)
    return [other for other, number in zip(others, shared, strict=True) if number == most and most]


def _named(name: str | int, cards: Sequence[Card]) -> Card:
    for card in cards:
        if name in (card.number, card.address) or (isinstance(name, str) and card.address == f"0000:{name}".lower()):
            return card
    listed = ", ".join(f"{card.number}: {card.address}" for card in cards) or "none"
    raise ConfigError(
        f"SmartSSDConfig(devices=[... {name!r} ...]): there is no such card.", f"Use one of these: {listed}."
    )


def _words(ssd: Ssd) -> str:
    return f"{ssd.name} ({ssd.path.address}) of {str(ssd.folder)!r}"


def _refused(problem: str, ssds: Sequence[Ssd], cards: Sequence[Card]) -> ConfigError:
    labels = {card.path: f"FPGA {card.number} ({card.shell})" for card in cards if card.path is not None}
    labels.update({ssd.path: f"SSD {ssd.name} ({ssd.folder})" for ssd in ssds})
    tree = drawn(labels)
    return ConfigError(f"{problem} What is on the PCI bus:\n{tree}\n", _REMEDY)
