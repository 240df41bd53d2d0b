"""Options of ``smart-infinity simulate``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from lightning_smartinfinity.cli.option_types import named_path, number_in, parameters_in, reading, whole_number_in
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where
from lightning_smartinfinity.settings.rules import between, number, optional, positive

__all__ = ["FORMATS_OF_HOST", "add_options"]

_SYSTEMS = {
    "zero-infinity": "the CPU, over a RAID0",
    "su": "SmartSSDs, as published without its handler",
    "su+o": "SmartSSDs by the published handler",
    "smartssd": "SmartSSDs by this package",
    "host": "the CPU by this package",
}
_CPU = 0.9  # 10^9 parameters per second: fp32 state on one core, by benchmarks/formats.py
_CORES = 8

_count = reading(parameters_in, between(1, 10**12))
_devices = reading(whole_number_in, between(1, 256))
_cores = reading(whole_number_in, between(1, 4096))
_rate = reading(number_in, number(1e-6, 1e9))
_ratio = reading(
    lambda text: None if text == "none" else number_in(text),
    replace(optional(positive(1)), remedy="Pass none, or a number above 0 and at most 1"),
)

_BOUND = [f"{name} with {form.required_parameters}" for name, form in STATE_FORMATS.items() if form.required_parameters]
_ROUNDED = " or ".join(rule.name for rule in RULES if rule.step in {form.step for form in STATE_FORMATS.values()})
FORMATS_OF_HOST = ", ".join(
    [f"list other state formats than {names_where(lambda form: form.in_place)} for host with {_ROUNDED} alone", *_BOUND]
)
"""Text that states which systems support which formats."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``smart-infinity simulate`` to its parser."""
    _add_lists(parser.add_argument_group("what is simulated, one or more of each"))
    _add_settings(parser.add_argument_group("how it is trained"))
    _add_machine(parser.add_argument_group("on which machine, rates in GB/s; without these it is the paper's"))
    parser.add_argument("--plot", type=named_path, metavar="FILE", help="draw the seconds of a step (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print rows and the machine as JSON")


def _add_lists(listed: Any) -> None:
    def add(name: str, default: list[Any], words: str, shown: str = "", **how: Any) -> None:
        shown = shown or " ".join(map(str, default))
        listed.add_argument(f"--{name}", nargs="+", default=default, help=f"{words} (default: {shown})", **how)

    add("parameters", [8_400_000_000], "of the model, such as 70B or 8.4e9", "8.4e9", type=_count, metavar="N")
    add("devices", [1, 2, 4, 6, 8, 10], "storage devices", type=_devices, metavar="N")
    systems = "; ".join(f"{name}: {who}" for name, who in _SYSTEMS.items())
    add("systems", ["zero-infinity", "su+o", "smartssd"], systems, choices=tuple(_SYSTEMS))
    formats = f"of the state on storage; {FORMATS_OF_HOST}"
    add("state-formats", ["fp32"], formats, choices=tuple(STATE_FORMATS))
    compression = (
        'TopK(ratio=...), or "none": all is sent; su and su+o send twice that volume, as published. The GPU chooses'
        " what is sent, in backward, in the time fitted to the paper; a choice by the CPU is not charged"
    )
    add("compression", [None], compression, "none", type=_ratio, metavar="RATIO")
    overlap = "what runs during this package's update: nothing, or the next forward"
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
        help="CPU cores; at most 8 of them store the residual (default: %(default)s)",
    )
