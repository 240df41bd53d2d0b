"""Describes the machine and the versions that a benchmark's numbers belong to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from lightning_smartinfinity.common.machine import available_cores


def describe(*packages: str) -> str:
    """Return one line: CPU model, cores, memory, kernel, Python and the versions of these packages.

    Only cores that this process may use are counted; a virtual machine or a container may share them with others.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    parts = [
        cpu_model(),
        f"{available_cores()} cores",
        f"{memory / 2**30:.1f} GiB of memory",
        f"Linux {platform.release()}",
        f"Python {platform.python_version()}",
    ]
    return ", ".join(parts + [f"{package} {metadata.version(package)}" for package in packages])


def cpu_model() -> str:
    """Return the kernel's name for the CPU, or else the architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
