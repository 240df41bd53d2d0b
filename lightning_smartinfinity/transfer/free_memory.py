"""How much host memory optimizer state may take: what the system has free, shared by the ranks of a machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["MemoryReport", "measure_memory", "share_of_memory"]

_MARGIN = 4  # one part in so many of all memory stays free: activations, page cache, other processes


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What one rank sees, in bytes.

    Args:
        host: Name of the machine.
        total: Memory of the machine, or of the control group.
        available: Of it, what can be had without swapping.
        reserved: What this rank is going to take for other purposes.
    """

    host: str
    total: int
    available: int
    reserved: int


def measure_memory(*, reserved: int, root: Path = Path("/")) -> MemoryReport:
    """This rank's report, from /proc/meminfo and the limits of its control groups.

    Args:
        reserved: As in :class:`MemoryReport`.
        root: Where ``proc`` and ``sys`` lie.
    """
    fields = _fields(root / "proc/meminfo", separator=":")
    seen = [(fields.get("MemTotal", 0) * 1024, fields.get("MemAvailable", 0) * 1024)]
    seen += _limits(root)
    return MemoryReport(
        host=platform.node(),
        total=min(total for total, _ in seen),
        available=min(available for _, available in seen),
        reserved=reserved,
    )


def share_of_memory(reports: Sequence[MemoryReport], host: str) -> int:
    """Bytes that each rank on ``host`` may take; it depends on the reports of all ranks only, not on their order."""
    local = [report for report in reports if report.host == host]
    total = min(report.total for report in local)
    # Every rank saw the same memory at a slightly different moment: the least counts.
    free = min(report.available for report in local) - total // _MARGIN - sum(report.reserved for report in local)
    return max(0, free) // len(local)


class _Files(NamedTuple):
    """How a version of control groups names what it tells of memory."""

    limit: str
    used: str
    inactive: str  # in memory.stat


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Of the process's control groups and of those that they are in: memory, and what is left of it."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                yield from _limits_of(root / "sys/fs/cgroup", path, _VERSION_2)
            elif "memory" in controllers.split(","):
                yield from _limits_of(root / "sys/fs/cgroup/memory", path, _VERSION_1)


def _limits_of(mounted: Path, path: str, files: _Files) -> Iterator[tuple[int, int]]:
    group = mounted / path.lstrip("/")
    for folder in (group, *group.parents):
        # No such file, or "max". In a container the path may be that of the host.
        with suppress(OSError, ValueError):
            if folder.is_relative_to(mounted):
                limit, used = int((folder / files.limit).read_text()), int((folder / files.used).read_text())
                # Of what is in use, pages of files that nobody looked at lately are given back for the asking.
                yield limit, limit - used + _fields(folder / "memory.stat").get(files.inactive, 0)


def _fields(path: Path, *, separator: str | None = None) -> dict[str, int]:
    fields = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(separator or " ")
            with suppress(ValueError, IndexError):
                fields[name] = int(value.split()[0])
    return fields
