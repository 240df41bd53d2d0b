"""``smart-infinity simulate``: simulates training steps in virtual time."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from lightning_smartinfinity.cli.simulation.options import FORMATS_OF_HOST, add_options
from lightning_smartinfinity.cli.simulation.steps import Case, Simulated
from lightning_smartinfinity.errors import ConfigError

if TYPE_CHECKING:
    from lightning_smartinfinity.planning.simulator.hardware import Machine

__all__ = ["DESCRIPTION", "add_options", "run"]

DESCRIPTION = """\
Simulate training steps of one machine and print their seconds, for every combination of the listed values that a
system can have.
Values that are not given are those of the machine of the Smart-Infinity paper, SmartSSDs behind one switch: stated
there, or fitted to its tables. Nothing is measured here, and nothing but the plot is written.
"""
_GIGA = 1e9
_GIBI = 1 << 30
_TABLE = "{parameters:>10}  {devices:>7}  {system:<14}{state:<15}{gradients:<11}{overlap:<9}"
_MEMORY = "{:>10}{:>12}{:>10}{:>10}"
_PURPOSES = (("gradient_arena", "arena"), ("ring", "ring"), ("payloads", "payloads"), ("residual", "residual"))
_SECONDS = "{forward:>10}{backward:>12}{update:>10}{step:>10}"


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from lightning_smartinfinity.cli.simulation.plot import check_plot, write_plot
    from lightning_smartinfinity.planning.paper.fit import fit

    cases = _possible(options)
    if options.plot is not None:
        check_plot(options.plot)
    machine = _machine(fit(duplex=options.duplex).machine(1, options.gpu), options)
    rows = [case.simulate(replace(machine, num_devices=case.devices)) for case in cases]
    if options.plot is not None:
        write_plot(rows, options.plot)
    if options.json:
        figures = {name: value for name, value in asdict(machine).items() if name != "num_devices"}  # differs by row
        print(json.dumps({"machine": figures, "rows": [row.as_json() for row in rows]}))
    else:
        _print(rows)
    return 0


def _machine(machine: Machine, options: argparse.Namespace) -> Machine:
    """Replace the rates of the paper's machine by the options' values."""
    from lightning_smartinfinity.planning.cost import FEED_BACK
    from lightning_smartinfinity.planning.simulator.handler import MOST_FEED_BACK_THREADS

    given = {name: _GIGA * getattr(options, name) for name in ("read", "write", "kernel") if getattr(options, name)}
    if options.kernel:
        given["sparse_kernel"] = given["kernel"]
    channel = machine.channel
    if options.channel:
        rate = _GIGA * options.channel
        channel = replace(channel, down=rate, up=rate, together=rate)
    feed_back = FEED_BACK / min(options.cores, MOST_FEED_BACK_THREADS)
    host = replace(machine.host, update=1 / (_GIGA * options.cpu), feed_back=feed_back, cores=options.cores)
    return replace(machine, device=replace(machine.device, **given), channel=channel, host=host)


def _possible(options: argparse.Namespace) -> list[Case]:
    """Return the possible cases; print which of the listed values occur in none.

    Raises:
        ConfigError: No case is possible.
    """
    cases = [case for case in _cases(options) if case.is_possible]
    if not cases:
        asked = f"--systems {' '.join(options.systems)} --state-formats {' '.join(options.state_formats)}"
        ratios = " ".join(map(_ratio_text, options.compression))
        raise ConfigError(
            f"smart-infinity simulate has nothing of {asked} --compression {ratios} --overlap"
            f" {' '.join(options.overlap)} --optimizer {options.optimizer} --dtype {options.dtype}.",
            f"Compress gradients of su, su+o and smartssd alone; {FORMATS_OF_HOST}, and overlap forward for"
            " smartssd and host.",
        )
    for name, listed, found in (
        ("systems", options.systems, {case.system for case in cases}),
        ("state-formats", options.state_formats, {case.state for case in cases}),
        ("compression", map(_ratio_text, options.compression), {_ratio_text(case.ratio) for case in cases}),
        ("overlap", options.overlap, {case.overlap for case in cases}),
    ):
        for value in dict.fromkeys(listed):
            if value not in found:
                print(
                    f"smart-infinity: --{name} {value} is left out: nothing else that is listed has it.",
                    file=sys.stderr,
                )
    return cases


def _ratio_text(ratio: float | None) -> str:
    return "none" if ratio is None else f"{ratio:g}"


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for parameters, system, state, ratio, overlap, devices in itertools.product(
        options.parameters,
        options.systems,
        options.state_formats,
        options.compression,
        options.overlap,
        options.devices,
    ):
        yield Case(
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
            gpu=options.gpu,
        )


def _print(rows: Sequence[Simulated]) -> None:
    """Print a table of seconds."""
    head = {name: name for name in ("parameters", "devices", "system", "state", "gradients", "overlap")}
    parts = {name: f"{name} s" for name in ("forward", "backward", "update", "step")}
    print(_TABLE.format(**head) + _SECONDS.format(**parts))
    for row in rows:
        seconds = {part: f"{getattr(row.time, part):.2f}" for part in parts}
        print(_TABLE.format(**row.columns) + _SECONDS.format(**seconds))
    _print_memory([row for row in rows if row.host_bytes])


def _print_memory(rows: Sequence[Simulated]) -> None:
    """Print a table in GiB, without the column of the overlap, which does not affect the update's memory."""
    held = {row.memory_columns: row.host_bytes for row in rows}
    if not held:
        return
    print("\nHost memory of the update, by one process with the whole model, in GiB")
    head = {name: name for name in ("parameters", "devices", "system", "state", "gradients")}
    print(_TABLE.format(**head, overlap="") + _MEMORY.format(*(what for _, what in _PURPOSES)))
    for columns, nbytes in held.items():
        shown = [f"{nbytes.get(purpose, 0) / _GIBI:.2f}" for purpose, _ in _PURPOSES]
        print(_TABLE.format(**dict(columns), overlap="") + _MEMORY.format(*shown))
