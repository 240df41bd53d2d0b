"""The identity of the machine on which a rank runs."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["machine_identity"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_identity() -> str:
    """Return an identity that all ranks of this machine share, even in containers, and that no other machine has.

    It is the kernel's boot id; if that is unavailable, the host name, which two machines may share.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return boot or platform.node()
