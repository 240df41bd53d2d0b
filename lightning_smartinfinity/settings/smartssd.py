"""Settings for SmartSSDs: ``smartssd``."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.settings.folders import names_file
from lightning_smartinfinity.settings.rules import Rule, one_of, optional, positive, require
from lightning_smartinfinity.settings.wrong_names import named_settings

__all__ = [
    "BUILD_REMEDY",
    "MAX_CARD_NUMBER",
    "TIMEOUT",
    "XCLBIN_VARIABLE",
    "NamedXclbin",
    "SmartSSDConfig",
    "is_xclbin_named",
    "require_xclbin_named",
]

XCLBIN_VARIABLE = "SMART_INFINITY_XCLBIN"

BUILD_REMEDY = (
    "Build it with `make -C hls xclbin` in a checkout or source distribution of this version (wheels have no hls/"
    " folder; Vitis 2021.2 to 2023.1, for the shell xilinx_u2_gen3x4_xdma_gc_2_202110_1) and pass"
    f" SmartSSDConfig(xclbin=...), or set {XCLBIN_VARIABLE}."
)

MAX_CARD_NUMBER = 65_535
"""Largest number in ``SmartSSDConfig(devices=...)``, larger than any machine needs."""

TIMEOUT = positive(2_147_483)
"""Rule for timeouts in seconds: XRT counts milliseconds in an int."""


def _cards(devices: object) -> tuple[str | int, ...] | None:
    """Return the cards as addresses or ints; None unless the value is a non-empty list of valid cards."""
    named = [_card(one) for one in devices] if isinstance(devices, (list, tuple)) else []
    cards = tuple(card for card in named if card is not None)
    return cards if cards and len(cards) == len(named) else None


def _card(value: Any) -> str | int | None:
    """Return an address, or an integer of any type (including NumPy's) as an int; None for any other value."""
    if isinstance(value, str):
        return value or None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if 0 <= number <= MAX_CARD_NUMBER and not isinstance(value, bool) else None


_XCLBIN = Rule("Pass the path of an xclbin", names_file, "names no file")

_CARDS = Rule(
    f"Pass a list with the PCI address of one card for each storage folder, or its number from 0 to {MAX_CARD_NUMBER}",
    lambda devices: _cards(devices) is not None,
    "names no cards",
    _cards,
)


@named_settings
@dataclass(frozen=True, kw_only=True)
class SmartSSDConfig:
    """Settings for Samsung SmartSSDs, whose accelerators update state next to the SSD.

    Args:
        xclbin: File with the kernels, built by ``make -C hls xclbin``. None: the file named by the environment variable
            SMART_INFINITY_XCLBIN.
        devices: Card of each storage folder, in the folders' order: its PCI address (``"0000:3d:00.1"``) or its number
            among the system's cards, ordered by address. None: the card on the same PCIe switch as the folder's SSD.
        gradient_route: How gradients reach a card: ``"host"`` (from host memory into the card's DRAM), ``"storage"``
            (written to the card's SSD, from which the card reads them directly, as published) or ``"auto"`` (same as
            ``"host"``).
        timeout: Seconds after which a kernel, or a transfer between card and SSD or card and host, is abandoned and the
            host takes over: above 0, and at most 2147483.
        binding: How XRT is called: ``"native"`` (its C library, without the interpreter's lock), ``"pyxrt"`` (its
            Python module, which holds the lock) or ``"auto"`` (native, or pyxrt if only pyxrt is available).

    Raises:
        ConfigError: A setting is unknown or has a forbidden value.
    """

    xclbin: str | Path | None = None
    devices: Sequence[str | int] | None = None
    gradient_route: str = "auto"
    timeout: float = 30.0
    binding: str = "auto"

    def __post_init__(self) -> None:
        require(
            self,
            xclbin=optional(_XCLBIN),
            devices=optional(_CARDS),
            gradient_route=one_of("auto", "host", "storage"),
            timeout=TIMEOUT,
            binding=one_of("auto", "native", "pyxrt"),
        )


class NamedXclbin(NamedTuple):
    """The absolute path of a supposed xclbin, and the setting that names it, in the user's notation."""

    path: Path
    setting: str


def is_xclbin_named(settings: SmartSSDConfig | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the settings or the environment name a file."""
    return bool((settings is not None and settings.xclbin) or environment.get(XCLBIN_VARIABLE))


def require_xclbin_named(settings: SmartSSDConfig | None, environment: Mapping[str, str] = os.environ) -> NamedXclbin:
    """Return the file that the settings or the environment name.

    Raises:
        ConfigError: Neither names a file, or the name cannot be a path.
    """
    name: str | Path | None = environment.get(XCLBIN_VARIABLE)
    setting = f"{XCLBIN_VARIABLE}={{!r}}"
    if settings is not None and settings.xclbin:
        name, setting = settings.xclbin, "SmartSSDConfig(xclbin={!r})"
    if not name:
        problem = "update_device='smartssd' needs the kernels' xclbin, and none is named."
        raise ConfigError(problem, BUILD_REMEDY)
    try:
        path = Path(name).expanduser().absolute()
    except (OSError, RuntimeError, ValueError) as error:  # such as an unknown user or no current folder
        problem = f"{setting.format(str(name))} names no file: {error}"
        raise ConfigError(problem, "Pass the path of an xclbin.") from error
    return NamedXclbin(path, setting.format(str(path)))
