"""How much host memory optimizer state may take: what the system has free, shared by the ranks of a machine."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """This rank's report, from /proc/meminfo and the limits of its control groups (version 2).

    Args:
        reserved: As in :class:`MemoryReport`.
        root: Where ``proc`` and ``sys`` lie.
    """
    fields = _fields(root / "proc/meminfo", separator=":")
    seen = [(fields.get("MemTotal", 0) * 1024, fields.get("MemAvailable", 0) * 1024)]
    seen += [limit for folder in _control_groups(root) if (limit := _limit_of(folder)) is not None]
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


def _control_groups(root: Path) -> Iterable[Path]:
    """Folders of the process's control group and of those that it is in."""
    mounted = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = mounted / line.removeprefix("0::").strip().lstrip("/")
                return [group, *(parent for parent in group.parents if parent.is_relative_to(mounted))]
    return []


def _limit_of(folder: Path) -> tuple[int, int] | None:
    """Memory that a control group may use, and what is left of it; None: it has no limit."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    # Of what is in use, pages of files that nobody looked at lately are given back for the asking.
    return limit, limit - used + _fields(folder / "memory.stat").get("inactive_file", 0)


def _fields(path: Path, *, separator: str | None = None) -> dict[str, int]:
    fields = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(separator or " ")
            with suppress(ValueError, IndexError):
                fields[name] = int(value.split()[0])
    return fields
