"""Systems that train GPT-2, side by side: each in a process of its own, with a table of what they measured."""

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
Columns = dict[str, tuple[str, int]]  # of a table: key of the figures, digits


def parse_options(
    description: str | None, *, size: str, systems: Sequence[str], default: Sequence[str]
) -> argparse.Namespace:
    """The command line.

    Args:
        description: Of the script.
        size: The model that is trained by default.
        systems: What can be compared.
        default: What is, by default.
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
    """Measures each system and prints a table, or is one such measurement.

    Args:
        script: The file to start for a system.
        options: The command line.
        run: Measures a system (name, size, steps, folder) in this process.
        columns: Of the table. What a system has no figure of stays empty.
        heading: What stands above the table: the machine, and what was trained.

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
    """What :func:`measure` reads of the process that it started."""
    print("FIGURES " + json.dumps(figures))


def measure(name: str, script: str, *arguments: str) -> Figures | None:
    """What a script reports in a process of its own; None if it fails, having said why."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    if done.returncode:
        print(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}", file=sys.stderr)
        return None
    print(f"{name} done", file=sys.stderr)
    figures: Figures = json.loads(done.stdout.split("FIGURES ")[1].splitlines()[0])
    return figures


def table(rows: dict[str, Figures], columns: Columns, *, head: str = "system") -> str:
    """Markdown."""
    lines = ["| " + " | ".join([head, *columns]) + " |", "|---" * (1 + len(columns)) + "|"]
    for system, row in rows.items():
        cells = [f"{row[key]:.{digits}f}" if key in row else "" for key, digits in columns.values()]
        lines.append("| " + " | ".join([system, *cells]) + " |")
    return "\n".join(lines)
