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

from gpt2 import SIZES
from training import WARMUP

Figures = dict[str, Any]
Columns = dict[str, tuple[str, int]]  # heading -> key of the figures, digits


def parse_options(
    description: str | None, *, size: str, systems: Sequence[str], default: Sequence[str]
) -> argparse.Namespace:
    """Parse the command line.

    Args:
        description: Description of the script.
        size: Default size of the model.
        systems: Systems that can be compared.
        default: Systems that are compared by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default=size)
    parser.add_argument("--systems", nargs="+", choices=systems, default=list(default))
    parser.add_argument("--steps", type=int, default=WARMUP + 5, help=f"the first {WARMUP} are not measured")
    parser.add_argument("--storage", help="folder on the disk to measure; default: a temporary one here")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--child", choices=systems, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= WARMUP:
        parser.error(f"--steps {options.steps} leaves none to measure: the first {WARMUP} warm up")
    return options


def compare(
    script: str,
    options: argparse.Namespace,
    *,
    run: Callable[[str, str, int, str], Figures],
    columns: Columns,
    heading: Callable[[], str],
) -> int:
    """Measure each system and print a table; with ``--child``, make one such measurement instead.

    Args:
        script: File to start for a system.
        options: The command line.
        run: Function that measures a system (name, size, steps, folder) in this process.
        columns: Columns of the table; a cell stays empty if a system has no such figure.
        heading: Function that describes the machine and the training, to stand above the table.

    Returns:
        Exit status: 1 if a system failed.
    """
    if options.child:
        report(run(options.child, options.size, options.steps, options.storage))
        return 0
    measured: dict[str, Figures | None] = {}
    for system in options.systems:
        with tempfile.TemporaryDirectory(dir=options.storage or ".") as folder:
            child = ["--child", system, "--size", options.size, "--storage", folder, "--steps", str(options.steps)]
            measured[system] = measure(system, script, *child)
    rows = {system: row for system, row in measured.items() if row is not None}
    print(f"{heading()}, {options.steps - WARMUP} measured steps\n")
    print(table(rows, columns))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    return int(len(rows) < len(measured))


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
