"""Computes how much host memory optimizer state may use: free memory, shared by the ranks of a machine.

Several limits may apply to a rank: the memory of its machine and of each of its control groups, such as a container's.
The ranks under a limit share it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.common.machine import machine_identity

__all__ = ["MemoryLimit", "MemoryReport", "measure_memory", "share_of_memory"]

_MARGIN = 4  # 1 / _MARGIN of a rank's memory stays free for activations, page cache and other processes
_MACHINE = "machine"


class MemoryLimit(NamedTuple):
    """A bound on memory, in bytes.

    Attributes:
        total: The bound.
        available: The part of it that can be used without swapping.
    """

    total: int
    available: int


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory that one rank sees. It holds plain values, so ranks can gather it as an object.

    Args:
        machine: :func:`~lightning_smartinfinity.common.machine.machine_identity` of the rank.
        limits: The rank's limits by name. Two ranks of a machine share the limits that have the same name.
        reserved: Bytes that this rank will use for other purposes.
    """

    machine: str
    limits: Mapping[str, MemoryLimit]
    reserved: int

    @property
    def margin(self) -> int:
        """Bytes that stay free: a quarter of the rank's smallest limit."""
        return min(limit.total for limit in self.limits.values()) // _MARGIN


def measure_memory(*, reserved: int, root: Path = Path("/")) -> MemoryReport:
    """Read /proc/meminfo and the limits of this process's control groups.

    Args:
        reserved: As in :class:`MemoryReport`.
        root: Folder that contains ``proc`` and ``sys``.
    """
    fields = _fields(root / "proc/meminfo", separator=":")
    machine = MemoryLimit(fields.get("MemTotal", 0) * 1024, fields.get("MemAvailable", 0) * 1024)
    return MemoryReport(
        machine=machine_identity(), limits={_MACHINE: machine, **dict(_group_limits(root))}, reserved=reserved
    )


def share_of_memory(reports: Sequence[MemoryReport], own: MemoryReport) -> int:
    """Return the bytes that a rank may use. The result does not depend on the order of the reports.

    If every rank takes its share, no limit is exceeded.

    Args:
        reports: Reports of all ranks.
        own: The rank's own report, which is one of ``reports``.
    """
    local = [report for report in reports if report.machine == own.machine]
    return min(_share(name, [report for report in local if name in report.limits]) for name in own.limits)


def _share(name: str, ranks: Sequence[MemoryReport]) -> int:
    """Return the bytes that each rank under one limit may use."""
    # Every rank measured the same memory at a slightly different time: the smallest value counts.
    available = min(rank.limits[name].available for rank in ranks)
    free = available - max(rank.margin for rank in ranks) - sum(rank.reserved for rank in ranks)
    return max(0, free) // len(ranks)


class _Files(NamedTuple):
    """Names of the files and fields in which a version of control groups reports memory."""

    limits: tuple[str, ...]  # the smallest counts
    used: str
    inactive: str  # in memory.stat


_VERSION_1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
# Beyond memory.high the kernel reclaims memory and slows the group's processes down, as if they had no more.
_VERSION_2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def _group_limits(root: Path) -> Iterator[tuple[str, MemoryLimit]]:
    """Yield the limits of the process's control groups and of their parents, each with its name."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                yield from _limits_on_path(root / "sys/fs/cgroup", path, _VERSION_2)
            elif "memory" in controllers.split(","):
                yield from _limits_on_path(root / "sys/fs/cgroup/memory", path, _VERSION_1)


def _limits_on_path(mounted: Path, path: str, files: _Files) -> Iterator[tuple[str, MemoryLimit]]:
    group = mounted / path.lstrip("/")
    for folder in (group, *group.parents):
        # In a container, the path may be the host's.
        limits = list(_numbers(folder, files.limits)) if folder.is_relative_to(mounted) else []
        with suppress(OSError, ValueError):
            if limits:
                limit, used = min(limits), int((folder / files.used).read_text())
                # The memory in use includes inactive file pages, which the kernel reclaims when memory is needed.
                inactive = _fields(folder / "memory.stat").get(files.inactive, 0)
                yield _group_name(folder), MemoryLimit(limit, limit - used + inactive)


def _numbers(folder: Path, names: Sequence[str]) -> Iterator[int]:
    """Yield the numbers in some files of a folder. A file may be missing or contain "max"."""
    for name in names:
        with suppress(OSError, ValueError):
            yield int((folder / name).read_text())


def _group_name(folder: Path) -> str:
    """Return a name that all containers of a machine agree on: each may see its own group as "/"."""
    status = os.stat(folder)
    return f"{status.st_dev}:{status.st_ino}"


def _fields(path: Path, *, separator: str | None = None) -> dict[str, int]:
    fields = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(separator or " ")
            with suppress(ValueError, IndexError):
                fields[name] = int(value.split()[0])
    return fields
