"""The machine on which a rank runs: its identity, and the control groups and cores of this process."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["available_cores", "control_groups", "machine_identity"]

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


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's control groups and of their parents, each with its version, 1 or 2.

    Args:
        controller: Name of a controller of version 1, such as ``"memory"``. Version 2 has one hierarchy for all.
        root: Folder that contains ``proc`` and ``sys``.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                mounted, version = root / "sys/fs/cgroup", 2
            elif controller in controllers.split(","):
                mounted, version = root / "sys/fs/cgroup" / controller, 1
            else:
                continue
            group = mounted / path.lstrip("/")
            # In a container, the path may be the host's, so that only the top of the hierarchy exists.
            yield from ((folder, version) for folder in (group, *group.parents) if folder.is_relative_to(mounted))


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, at least 1.

    These are the cores of its affinity mask, or the whole cores of the smallest quota of its control groups.

    Args:
        root: Folder that contains ``proc`` and ``sys``.
    """
    cores = [len(os.sched_getaffinity(0))]
    for folder, version in control_groups("cpu", root):
        with suppress(OSError, ValueError):  # there may be no such file, and "max" is no quota
            if version == 1:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (folder / "cpu.max").read_text().split()
            if int(quota) > 0:
                cores.append(int(quota) // int(period))
    return max(1, min(cores))
