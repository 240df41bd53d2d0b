"""Reads from XRT's driver whether other PCI devices can reach a card's memory."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.devices.smartssd.discovery.system import entries_of, text_of

__all__ = ["P2P", "P2PState", "p2p_of"]


class P2PState(enum.Enum):
    """The state of a card's P2P memory window."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    WARM_REBOOT = "enabled, from the next warm reboot on"
    BROKEN = "its remapper is set to another size"
    NOT_SUPPORTED = "not supported by the shell"
    UNKNOWN = "unknown: not reported by the driver"


class P2P(NamedTuple):
    """The P2P memory window as reported by the driver.

    Args:
        state: State of the window.
        bar_bytes: Present size of the window; ``None`` if the driver does not report it.
        expected_bytes: Size of a window over all of the card's memory; ``None`` if the driver does not report it.
    """

    state: P2PState
    bar_bytes: int | None
    expected_bytes: int | None

    def remedy(self, card: str) -> str:
        """Return advice for enabling the window.

        Args:
            card: PCI address of the card.
        """
        enable = f"xbutil configure --device {card} --p2p enable"
        if self.state is P2PState.WARM_REBOOT:
            return "Reboot the machine warm (reboot, not power off): the BIOS then gives the card its larger window."
        if self.state is P2PState.DISABLED:
            return (
                f"Run `{enable}` as root and reboot warm; the BIOS must allow memory above 4 GiB ('Above 4G Decoding')."
            )
        if self.state is P2PState.BROKEN:
            return f"Run `xbutil configure --device {card} --p2p disable`, then `{enable}`, as root, and reboot warm."
        return "Install the card's shell and the XRT that goes with it, and check `xbutil examine`."


def p2p_of(card: Path) -> P2P:
    """Read the P2P state of a card.

    Args:
        card: Sysfs folder of the card's user function.
    """
    folders = [entry for entry in entries_of(card) if entry.name == "p2p" or entry.name.startswith("p2p.")]
    content = next((text for folder in folders if (text := text_of(folder / "config")) is not None), None)
    if content is None:
        return P2P(P2PState.UNKNOWN, None, None)
    numbers = _numbers(content)
    bar, expected = numbers.get("bar"), numbers.get("exp_bar")
    return P2P(_state(numbers), bar, expected)


def _numbers(content: str) -> dict[str, int]:
    numbers = {}
    for line in content.splitlines():
        name, _, value = line.partition(":")
        try:
            numbers[name.strip()] = int(value, 0)
        except ValueError:
            continue  # a later driver may report values that are not numbers
    return numbers


def _state(numbers: dict[str, int]) -> P2PState:
    """Apply the rules of XRT's own tools in the same order."""
    bar = numbers.get("bar", -1)
    remap = numbers.get("remap", -1)
    if bar == -1:
        return P2PState.NOT_SUPPORTED
    if numbers.get("rbar", -1) > bar:
        return P2PState.WARM_REBOOT
    if remap > 0 and remap != bar:
        return P2PState.BROKEN
    return P2PState.ENABLED if bar == numbers.get("exp_bar", -1) else P2PState.DISABLED
