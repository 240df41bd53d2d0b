"""Which machine a rank runs on."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["machine_identity"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_identity() -> str:
    """The same on all ranks of one machine, whatever their containers are called, and on no other machine.

    Host names may be the same on two machines. Where the kernel tells no number of its boot, they have to do.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return boot or platform.node()
