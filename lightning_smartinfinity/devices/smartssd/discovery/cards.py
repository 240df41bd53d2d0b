"""Finds the FPGA cards of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.devices.smartssd.discovery.p2p import P2P, P2PState, p2p_of
from lightning_smartinfinity.devices.smartssd.discovery.pci import PciPath, functions_of_class, path_of
from lightning_smartinfinity.devices.smartssd.discovery.system import System, entries_of, text_of

__all__ = ["Card", "cards_of", "driver_version", "emulated_card", "unusable_node", "without_driver"]

_XILINX = "0x10ee"
_ACCELERATOR_CLASS = "0x1200"
_DRIVER = "bus/pci/drivers/xocl"


class Card(NamedTuple):
    """A card as reported by the driver.

    Args:
        number: Position among the cards, ordered by address.
        path: PCI path of its user function; ``None`` for an emulated card.
        shell: Name of the platform flashed onto it; ``None`` if the driver does not report it.
        node: Its device node; ``None`` if the driver does not report it.
        p2p: State of its P2P memory window, through which the SSD reaches its memory.
    """

    number: int
    path: PciPath | None
    shell: str | None
    node: Path | None
    p2p: P2P

    @property
    def address(self) -> str:
        """PCI address of the user function; the number of an emulated card."""
        return str(self.number) if self.path is None else self.path.address

    @property
    def label(self) -> str:
        """The card's name in messages."""
        return f"emulated card {self.number}" if self.path is None else f"card {self.address}"


def cards_of(system: System) -> list[Card]:
    """Return all cards bound to XRT's driver, ordered by address."""
    found = []
    for function in entries_of(system.sysfs / _DRIVER):
        path = path_of(function)
        if path is not None and path.address == function.name:
            found.append((path, function.resolve()))
    found.sort(key=lambda pair: pair[0].address)
    return [
        Card(number, path, _shell(folder), _node(system, folder), p2p_of(folder))
        for number, (path, folder) in enumerate(found)
    ]


def driver_version(system: System) -> str | None:
    """Return the version of XRT's driver xocl, empty if unknown; ``None`` if the driver is not loaded."""
    driver = system.sysfs / _DRIVER
    return text_of(driver / "module/version") or "" if driver.is_dir() else None


def emulated_card(number: int) -> Card:
    """Return a card that XRT emulates, and that sysfs does not list."""
    return Card(number, None, None, None, P2P(P2PState.UNKNOWN, None, None))


def without_driver(system: System) -> list[str]:
    """Return the addresses of Xilinx accelerators without a driver."""
    return [
        function.name
        for function in functions_of_class(system, _ACCELERATOR_CLASS)
        if text_of(function / "vendor") == _XILINX and not (function / "driver").exists()
    ]


def unusable_node(system: System, card: Card) -> str | None:
    """Return the reason why this user cannot open a card's device node; ``None`` if usable or unknown."""
    if card.node is None or system.may_use(card.node):
        return None
    if not card.node.exists():
        return f"its device node {card.node} is not there (in a container: pass it in with --device)"
    return f"this user may not read and write {card.node} (its group is 'render' as a rule: usermod -aG render USER)"


def _shell(folder: Path) -> str | None:
    for entry in entries_of(folder):
        if entry.name.startswith("rom") and (name := text_of(entry / "VBNV")):
            return name
    return None


def _node(system: System, folder: Path) -> Path | None:
    names = [entry.name for entry in entries_of(folder / "drm") if entry.name.startswith("renderD")]
    return system.dev / "dri" / names[0] if names else None
