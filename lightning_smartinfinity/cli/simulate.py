"""``smart-infinity simulate``: what training steps take, in virtual time."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.cli.simulated_steps import Case, Simulated
from lightning_smartinfinity.store.extents import STATE_FORMATS

if TYPE_CHECKING:
    from lightning_smartinfinity.plan.machine import Machine

__all__ = ["add_to"]

_DESCRIPTION = """\
Simulate training steps and print their seconds: of every combination of what is listed, but those that no system has.
What is not given is as on the machine of the Smart-Infinity paper, SmartSSDs behind one switch: stated there, or fitted
to its tables. Nothing is measured here, and nothing but the plot is written.
"""
_SYSTEMS = {
    "zero-infinity": "the CPU, over a RAID0",
    "su": "SmartSSDs, as published without its handler",
    "su+o": "SmartSSDs by the published handler",
    "smartssd": "SmartSSDs by this package",
    "host": "the CPU by this package",
}
_GIGA = 1e9
_GIBI = 1 << 30
_CPU = 0.9  # 10^9 parameters per second: fp32 state on one core, by benchmarks/formats.py
_MOST_PARAMETERS = 1e12
_MOST_DEVICES = 256
_LEAST_RATE, _MOST_RATE = 1e-6, 1e9
_SHOWN = 40  # characters
_TABLE = "{parameters:>10}  {devices:>7}  {system:<14}{state:<15}{gradients:<11}{overlap:<9}"
_MEMORY = "{:>10}{:>12}{:>10}{:>10}"
_PURPOSES = (("gradient_arena", "arena"), ("ring", "ring"), ("payloads", "payloads"), ("residual", "residual"))
_SECONDS = "{forward:>10}{backward:>12}{update:>10}{step:>10}"


def add_to(commands: Any) -> None:
    """Add the command to what ``ArgumentParser.add_subparsers`` returns."""
    parser = commands.add_parser("simulate", help="what a training step takes elsewhere", description=_DESCRIPTION)
    listed = parser.add_argument_group("what is simulated, one or more of each")
    listed.add_argument(
        "--parameters", nargs="+", type=_count, default=[8_400_000_000], metavar="N", help="8.4e9 if left out"
    )
    listed.add_argument(
        "--devices",
        nargs="+",
        type=_devices,
        default=[1, 2, 4, 6, 8, 10],
        metavar="N",
        help="storage devices; 1 2 4 6 8 10 if left out",
    )
    systems = "; ".join(f"{name}: {who}" for name, who in _SYSTEMS.items())
    listed.add_argument(
        "--systems", nargs="+", choices=tuple(_SYSTEMS), default=["zero-infinity", "su+o", "smartssd"], help=systems
    )
    listed.add_argument(
        "--state-formats",
        nargs="+",
        choices=tuple(STATE_FORMATS),
        default=["fp32"],
        help="of the state on storage; other than fp32 the host alone has",
    )
    listed.add_argument(
        "--compression",
        nargs="+",
        type=_ratio,
        default=[None],
        metavar="RATIO",
        help='TopK(ratio=...), or "none"; of su+o twice that volume, as published. The GPU chooses what is sent, in'
        " backward, in the time fitted to the paper; a choice by the CPU is not charged",
    )
    listed.add_argument(
        "--overlap",
        nargs="+",
        choices=("none", "forward"),
        default=["none"],
        help="what the update of this package runs beside: nothing, or the next forward",
    )
    _add_settings(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the seconds of a step there (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print rows and the machine as JSON")
    parser.set_defaults(run=_run)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    settings = parser.add_argument_group("how it is trained")
    settings.add_argument("--optimizer", choices=("adamw", "adagrad", "sgd"), default="adamw", help="whose state it is")
    settings.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of this package's gradients and parameters"
    )
    settings.add_argument("--gradient-route", choices=("host", "storage"), default="host", help="of smartssd")
    settings.add_argument(
        "--error-feedback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compressed gradients have a residual in host memory; its seconds are not charged",
    )
    machine = parser.add_argument_group("on which machine, rates in GB/s")
    machine.add_argument("--gpu", choices=("A5000", "A100"), default="A5000", help="forward and backward")
    machine.add_argument(
        "--duplex", action="store_true", help="SSDs read and write side by side; else they share their time"
    )
    for name, what in (
        ("read", "of one SSD; 2.8 if left out"),
        ("write", "of one SSD; 1.62 if left out"),
        ("kernel", "of an accelerator: arrays and gradient in fp32; 8.2, or 6.9 with compression, if left out"),
        ("channel", "of all devices together, up and down; 6.33 if left out"),
    ):
        machine.add_argument(f"--{name}", type=_rate, metavar="RATE", help=what)
    machine.add_argument(
        "--cpu",
        type=_rate,
        default=_CPU,
        metavar="RATE",
        help="10^9 parameters per second that host updates (default: %(default)s)",
    )


def _run(options: argparse.Namespace) -> int:
    from lightning_smartinfinity.cli.step_plot import check_plot, write_plot
    from lightning_smartinfinity.plan.fit import fit

    if options.plot is not None:
        check_plot(options.plot)
    paper = fit(duplex=options.duplex)
    machine = _machine(paper.machine(1, options.gpu), options)
    rows = [case.simulate(replace(machine, num_devices=case.devices)) for case in _cases(options)]
    if options.plot is not None:
        write_plot(rows, options.plot)
    if options.json:
        print(json.dumps({"machine": asdict(replace(machine, num_devices=1)), "rows": [row.as_json() for row in rows]}))
    else:
        _print(rows)
    return 0


def _machine(machine: Machine, options: argparse.Namespace) -> Machine:
    """The paper's, with the rates that were given."""
    given = {name: _GIGA * getattr(options, name) for name in ("read", "write", "kernel") if getattr(options, name)}
    if options.kernel:
        given["sparse_kernel"] = given["kernel"]
    channel = machine.channel
    if options.channel:
        rate = _GIGA * options.channel
        channel = replace(channel, down=rate, up=rate, together=rate)
    host = replace(machine.host, update=1 / (_GIGA * options.cpu))
    return replace(machine, device=replace(machine.device, **given), channel=channel, host=host)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for parameters, system, state, ratio, overlap, devices in itertools.product(
        options.parameters,
        options.systems,
        options.state_formats,
        options.compression,
        options.overlap,
        options.devices,
    ):
        case = Case(
            parameters=parameters,
            devices=devices,
            system=system,
            state=state,
            ratio=ratio,
            overlap=overlap,
            optimizer=options.optimizer,
            dtype=options.dtype,
            route=options.gradient_route,
            error_feedback=options.error_feedback,
        )
        if case.is_possible:
            yield case


def _print(rows: Sequence[Simulated]) -> None:
    """Columns, in seconds."""
    head = {name: name for name in ("parameters", "devices", "system", "state", "gradients", "overlap")}
    parts = {name: f"{name} s" for name in ("forward", "backward", "update", "step")}
    print(_TABLE.format(**head) + _SECONDS.format(**parts))
    for row in rows:
        seconds = {part: f"{getattr(row.time, part):.2f}" for part in parts}
        print(_TABLE.format(**row.columns) + _SECONDS.format(**seconds))
    _print_memory([row for row in rows if row.host_bytes])


def _print_memory(rows: Sequence[Simulated]) -> None:
    """Columns, in GiB; the update holds as much whatever it runs beside."""
    held = {row.memory_columns: row.host_bytes for row in rows}
    if not held:
        return
    print("\nHost memory of the update, by one process with the whole model, in GiB")
    head = {name: name for name in ("parameters", "devices", "system", "state", "gradients")}
    print(_TABLE.format(**head, overlap="") + _MEMORY.format(*(what for _, what in _PURPOSES)))
    for columns, nbytes in held.items():
        shown = [f"{nbytes.get(purpose, 0) / _GIBI:.2f}" for purpose, _ in _PURPOSES]
        print(_TABLE.format(**dict(columns), overlap="") + _MEMORY.format(*shown))


def _count(text: str) -> int:
    """Of parameters: "8.4e9" is one."""
    number = _number(text)
    if not 1 <= number <= _MOST_PARAMETERS or number != int(number):
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is no number from 1 to {_MOST_PARAMETERS:g}")
    return int(number)


def _devices(text: str) -> int:
    number = _number(text)
    if number not in range(1, _MOST_DEVICES + 1):
        raise argparse.ArgumentTypeError(f"{text[:_SHOWN]!r} is no number from 1 to {_MOST_DEVICES}")
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
