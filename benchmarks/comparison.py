"""Compares systems that train GPT-2: runs each in a process of its own and prints a table of their figures."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpt2 import CONTEXT, SIZES
from training import WARMUP

Figures = dict[str, Any]
Columns = dict[str, tuple[str, int]]  # heading -> key of the figures, digits

_OF_PARENT = ("systems", "rounds", "json", "child", "storage")  # options that say nothing to a child


def parse_options(
    description: str | None, *, warm_up: int = WARMUP, **options: dict[str, Any] | None
) -> argparse.Namespace:
    """Parse the command line.

    Args:
        description: Description of the script.
        warm_up: Number of steps that are not measured.
        **options: Arguments of ``add_argument`` by option, over those of the options that all scripts have. None
            removes such an option.
    """
    common: dict[str, dict[str, Any]] = {
        "size": {"choices": SIZES, "default": "124m"},
        "tokens": {"type": int, "default": 32, "help": f"of a step, at most {CONTEXT}"},
        "steps": {"type": int, "default": WARMUP + 5, "help": f"the first {WARMUP} are not measured"},
        "storage": {"default": ".", "help": "folder on the disk to measure"},
        "json": {"type": Path, "help": "write the figures there, too"},
        "child": {"help": argparse.SUPPRESS},
    }
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, how in {**common, **options}.items():
        if how is not None:
            parser.add_argument(f"--{name.replace('_', '-')}", **{**common.get(name, {}), **how})
    parsed = parser.parse_args()
    if "steps" in parsed and parsed.steps <= warm_up:
        parser.error(f"--steps {parsed.steps} leaves none to measure: the first {warm_up} warm up")
    return parsed


def several(systems: Sequence[str], default: Sequence[str] | None = None, **how: Any) -> dict[str, Any]:
    """Return the option that chooses some of the systems, for :func:`parse_options`."""
    return {"nargs": "+", "choices": systems, "default": list(default or systems), **how}


def compare(
    script: str,
    options: argparse.Namespace,
    *,
    run: Callable[[argparse.Namespace], Figures],
    columns: Columns,
    machine: Callable[[], str],
    heading: str,
    rows: Callable[[], dict[str, Figures | None]] | None = None,
) -> int:
    """Measure each system and print a table; with ``--child``, make one such measurement instead.

    Args:
        script: File to start for a system.
        options: The command line.
        run: Function that measures the system ``options.child`` in this process.
        columns: Columns of the table; a cell stays empty if a system has no such figure.
        machine: Function that describes the machine.
        heading: Line above the table.
        rows: Function that measures all systems, None for one that fails, if not only one after the other.

    Returns:
        Exit status: 1 if a system failed.
    """
    if options.child:
        report(run(options))
        return 0
    told = machine()
    print(told, flush=True)
    found = one_by_one(script, options) if rows is None else dict(rows())
    measured = {system: figures for system, figures in found.items() if figures is not None}
    names = {"benchmark": Path(script).stem, "size": options.size}
    show(measured, columns, heading=heading, path=options.json, machine=told, **names)
    return int(len(measured) < len(found))


def show(rows: dict[str, Figures], columns: Columns, *, heading: str, path: Path | None, **figures: Any) -> None:
    """Print a table below its heading, and write its rows as JSON with other figures, if ``--json`` names a file."""
    print(f"\n{heading}\n")
    print(table(rows, columns))
    write_figures(path, **figures, heading=heading, rows=rows)


def one_by_one(script: str, options: argparse.Namespace) -> dict[str, Figures | None]:
    """Measure the chosen systems, each once; None for one that fails."""
    return {system: in_child(script, options, system) for system in options.systems}


def in_child(script: str, options: argparse.Namespace, child: str, **changed: Any) -> Figures | None:
    """Let a script measure a system in a process of its own, in a new folder; return None if it fails.

    Args:
        script: The script.
        options: The command line, which the process has as well.
        child: The system.
        **changed: Options with other values.
    """
    given = {name: value for name, value in vars(options).items() if name not in _OF_PARENT} | changed
    arguments = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="benchmark-") as folder:
        told = ", ".join([child, *(f"{name} {value}" for name, value in changed.items())])
        return measure(told, script, "--child", child, "--storage", folder, *arguments)


def report(figures: Figures) -> None:
    """Print figures so that :func:`measure` finds them in the output of a child process."""
    print("FIGURES " + json.dumps(figures))


def measure(name: str, script: str, *arguments: str) -> Figures | None:
    """Run a script in a process of its own and return its figures; None if it fails, which is printed."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if done.returncode:
        print(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}", file=sys.stderr)
        return None
    print(f"{name} done", file=sys.stderr)
    figures: Figures = json.loads(done.stdout.split("FIGURES ")[1].splitlines()[0])
    return figures


def table(rows: dict[str, Figures], columns: Columns, *, head: str = "system") -> str:
    """Format a table in Markdown."""
    lines = ["| " + " | ".join([head, *columns]) + " |", "|---" * (1 + len(columns)) + "|"]
    for system, row in rows.items():
        cells = [f"{row[key]:.{digits}f}" if key in row else "" for key, digits in columns.values()]
        lines.append("| " + " | ".join([system, *cells]) + " |")
    return "\n".join(lines)


def write_figures(path: Path | None, **figures: Any) -> None:
    """Write figures as JSON, if ``--json`` names a file."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
