"""Options of ``smart-infinity simulate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_smartinfinity.store.extents import STATE_FORMATS
from lightning_smartinfinity.update_rules import RULES

__all__ = ["add_options"]

_SYSTEMS = {
    "zero-infinity": "the CPU, over a RAID0",
    "su": "SmartSSDs, as published without its handler",
    "su+o": "SmartSSDs by the published handler",
    "smartssd": "SmartSSDs by this package",
    "host": "the CPU by this package",
}
_CPU = 0.9  # 10^9 parameters per second: fp32 state on one core, by benchmarks/formats.py
_CORES = 8
_MOST_PARAMETERS = 1e12
_MOST_DEVICES = 256
_MOST_CORES = 4096
_LEAST_RATE, _MOST_RATE = 1e-6, 1e9
_SHOWN = 40  # characters


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a command.

    Args:
        parser: Of the command.
    """
    _add_lists(parser.add_argument_group("what is simulated, one or more of each"))
    _add_settings(parser.add_argument_group("how it is trained"))
    _add_machine(parser.add_argument_group("on which machine, rates in GB/s; without these it is the paper's"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the seconds of a step there (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print rows and the machine as JSON")


def _add_lists(listed: Any) -> None:
    def add(name: str, default: list[Any], words: str, shown: str = "", **how: Any) -> None:
        shown = shown or " ".join(map(str, default))
        listed.add_argument(f"--{name}", nargs="+", default=default, help=f"{words} (default: {shown})", **how)

    add("parameters", [8_400_000_000], "of the model", "8.4e9", type=_count, metavar="N")
    add("devices", [1, 2, 4, 6, 8, 10], "storage devices", type=_devices, metavar="N")
    systems = "; ".join(f"{name}: {who}" for name, who in _SYSTEMS.items())
    add("systems", ["zero-infinity", "su+o", "smartssd"], systems, choices=tuple(_SYSTEMS))
    formats = "of the state on storage; other than fp32 host alone has, of adamw, and int8_remainder with bf16"
    add("state-formats", ["fp32"], formats, choices=tuple(STATE_FORMATS))
    compression = (
        'TopK(ratio=...), or "none": all is sent; su and su+o send twice that volume, as published. The GPU chooses'
        " what is sent, in backward, in the time fitted to the paper; a choice by the CPU is not charged"
    )
    add("compression", [None], compression, "none", type=_ratio, metavar="RATIO")
    overlap = "what the update of this package runs beside: nothing, or the next forward"
    add("overlap", ["none"], overlap, choices=("none", "forward"))


def _add_settings(settings: Any) -> None:
    def add(name: str, words: str, choices: tuple[str, ...]) -> None:
        words = f"{words} (default: %(default)s)"
        settings.add_argument(f"--{name}", choices=choices, default=choices[0], help=words)

    add("optimizer", "whose state it is, in all systems", tuple(rule.name for rule in RULES))
    add("dtype", "of this package's gradients and parameters; published systems have fp32", ("bf16", "fp16", "fp32"))
    add(
        "gradient-route",
        "how gradients reach the accelerators of smartssd: from host memory, or by way of their SSDs",
        ("host", "storage"),
    )
    settings.add_argument(
        "--error-feedback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="smartssd keeps what it does not send of compressed gradients, in host memory and after the update, as it"
        " does by default",
    )


def _add_machine(machine: Any) -> None:
    machine.add_argument(
        "--gpu", choices=("A5000", "A100"), default="A5000", help="of forward and backward (default: %(default)s)"
    )
    machine.add_argument(
        "--duplex", action="store_true", help="SSDs read and write side by side; else they share their time"
    )
    for name, what in (
        ("read", "of one SSD (default: 2.8)"),
        ("write", "of one SSD (default: 1.62)"),
        ("kernel", "of an accelerator: arrays and gradient in fp32 (default: 8.2, with compression 6.9)"),
        ("channel", "of all devices together, up and down (default: 6.33)"),
    ):
        machine.add_argument(f"--{name}", type=_rate, metavar="RATE", help=what)
    machine.add_argument(
        "--cpu",
        type=_rate,
        default=_CPU,
        metavar="RATE",
        help="10^9 parameters per second that host updates (default: %(default)s)",
    )
    machine.add_argument(
        "--cores",
        type=_cores,
        default=_CORES,
        metavar="N",
        help="of the CPU: so many threads keep what smartssd does not send, at most 8 (default: %(default)s)",
    )


def _count(text: str) -> int:
    """Of parameters: "8.4e9" is one."""
    number = _number(text)
    if not 1 <= number <= _MOST_PARAMETERS or number != int(number):
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is no number from 1 to {_MOST_PARAMETERS:g}")
    return int(number)


def _devices(text: str) -> int:
    return _few(text, _MOST_DEVICES)


def _cores(text: str) -> int:
    return _few(text, _MOST_CORES)


def _few(text: str, most: int) -> int:
    number = _number(text)
    if number not in range(1, most + 1):
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is no number from 1 to {most}")
    return int(number)


def _ratio(text: str) -> float | None:
    if text == "none":
        return None
    number = _number(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is neither 'none' nor above 0 and at most 1")
    return number


def _rate(text: str) -> float:
    number = _number(text)
    if not _LEAST_RATE <= number <= _MOST_RATE:
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is no number from {_LEAST_RATE:g} to {_MOST_RATE:g}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
