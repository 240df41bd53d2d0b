"""Options that name SmartSSDs, for the commands that use them."""

from __future__ import annotations

import argparse
import re

from lightning_smartinfinity.cli.option_types import digits, reading, storage_folder
from lightning_smartinfinity.settings import MAX_CARD_NUMBER, SmartSSDConfig
from lightning_smartinfinity.settings.rules import Rule, between

__all__ = ["add_cards", "cards_of"]

_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_NUMBER = between(0, MAX_CARD_NUMBER)
_card = reading(
    lambda text: text if _ADDRESS.fullmatch(text) else digits(text),
    Rule(
        f"Pass a PCI address such as 0000:3d:00.1, or a number from 0 to {MAX_CARD_NUMBER}",
        lambda value: isinstance(value, str) or _NUMBER.holds(value),
        "names no card",
    ),
)


def add_cards(parser: argparse.ArgumentParser, *, xclbin_default: str = "") -> None:
    """Add the options to a parser.

    Args:
        parser: The parser.
        xclbin_default: Text for the help: the default source of the xclbin.
    """
    parser.add_argument("folders", nargs="*", type=storage_folder, help="storage folders, one on the SSD of each card")
    default = f" (default: {xclbin_default})" if xclbin_default else ""
    parser.add_argument("--xclbin", help=f"SmartSSDConfig(xclbin=...){default}")
    parser.add_argument("--devices", nargs="+", type=_card, help="SmartSSDConfig(devices=...): a card for each folder")
    parser.add_argument(
        "--binding", default=SmartSSDConfig.binding, help="SmartSSDConfig(binding=...): auto, native or pyxrt"
    )


def cards_of(options: argparse.Namespace, *, xclbin: str | None = None) -> SmartSSDConfig:
    """Return the card settings from the options.

    Args:
        options: The parsed command line.
        xclbin: The xclbin to use if the command line names none.

    Raises:
        ConfigError: The options contradict each other.
    """
    return SmartSSDConfig(xclbin=options.xclbin or xclbin, devices=options.devices, binding=options.binding)
