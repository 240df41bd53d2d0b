"""Whether a card lets other PCI devices reach its memory, as XRT's driver tells it."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.devices.smartssd.system import entries_of, text_of

__all__ = ["P2P", "P2PState", "p2p_of"]


class P2PState(enum.Enum):
    """Of a card's P2P memory window."""

    ENABLED = "enabled"
    DISABLED = "disabled"
    WARM_REBOOT = "enabled, from the next warm reboot on"
    BROKEN = "its remapper is set to another size"
    NOT_SUPPORTED = "not supported by the shell"
    UNKNOWN = "unknown: the driver does not tell"


class P2P(NamedTuple):
    """What the driver says.

    Args:
        state: In one word.
        bar_bytes: Of the window as it is; None: not told.
        expected_bytes: That it has when all of the card's memory is in it; None: not told.
    """

    state: P2PState
    bar_bytes: int | None
    expected_bytes: int | None

    def remedy(self, card: str) -> str:
        """What to do so that it is enabled.

        Args:
            card: PCI address.
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
    """Read the state of one card.

    Args:
        card: Its folder in sysfs, that of the user function.
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
            continue  # a later driver's words
    return numbers


def _state(numbers: dict[str, int]) -> P2PState:
    """As XRT's own tools read it, in the same order."""
    bar = numbers.get("bar", -1)
    remap = numbers.get("remap", -1)
    if bar == -1:
        return P2PState.NOT_SUPPORTED
    if numbers.get("rbar", -1) > bar:
        return P2PState.WARM_REBOOT
    if remap > 0 and remap != bar:
        return P2PState.BROKEN
    return P2PState.ENABLED if bar == numbers.get("exp_bar", -1) else P2PState.DISABLED
