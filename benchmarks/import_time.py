"""Measures what this package adds to the time of ``import torch``.

Torch looks for ``torch.backends`` entry points at the end of its import and calls this package's
(``lightning_smartinfinity._autoload:install``). Each sample is a fresh interpreter. Samples with and without it
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``) alternate, and a third kind times its parts separately. Usage::

    python benchmarks/import_time.py [--runs 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from machine import describe

IMPORT_TORCH = """
import time
start = time.perf_counter()
import torch
print(time.perf_counter() - start)
"""

SCAN_AND_INSTALL = """
import time
import torch
from importlib.metadata import entry_points
start = time.perf_counter()
found = entry_points(group="torch.backends")
scanned = time.perf_counter()
for entry_point in found:
    if entry_point.value.startswith("lightning_smartinfinity."):
        entry_point.load()()
print(scanned - start, time.perf_counter() - scanned)
"""


def main() -> None:
    """Print medians and spreads in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="samples of each kind")
    runs = parser.parse_args().runs
    fresh_python(IMPORT_TORCH, autoload=True)  # fills the page cache
    off: list[float] = []
    on: list[float] = []
    scan: list[float] = []
    install: list[float] = []
    for _ in range(runs):
        off += fresh_python(IMPORT_TORCH, autoload=False)
        on += fresh_python(IMPORT_TORCH, autoload=True)
        parts = fresh_python(SCAN_AND_INSTALL, autoload=False)
        scan.append(parts[0])
        install.append(parts[1])
    print(describe("torch"))
    print(f"{runs} runs each, milliseconds")
    print_row("import torch, autoload off", off)
    print_row("import torch, autoload on", on)
    print_row("  torch's own scan for entry points", scan)
    print_row("  this package's entry point", install)


def fresh_python(code: str, *, autoload: bool) -> list[float]:
    """Run code in a new interpreter and return the numbers that it prints."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    return [float(number) for number in completed.stdout.split()]


def print_row(name: str, seconds: list[float]) -> None:
    """Print one row: median, minimum and maximum."""
    print(
        f"{name:<36} median {statistics.median(seconds) * 1e3:8.2f}"
        f"   min {min(seconds) * 1e3:8.2f}   max {max(seconds) * 1e3:8.2f}"
    )


if __name__ == "__main__":
    main()
