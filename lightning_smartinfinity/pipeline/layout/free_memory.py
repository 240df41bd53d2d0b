"""Computes how much host memory optimizer state may use: free memory, shared by the ranks of a machine.

Several limits may apply to a rank: the memory of its machine, what the machine may promise to processes
(``vm.overcommit_memory=2``), the memory of each of its control groups, such as a container's, and the limits of the
process (``ulimit -v`` and ``-d``). The ranks under a limit share it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.common.machine import control_groups, machine_identity

__all__ = [
    "MemoryLimit",
    "MemoryReport",
    "margin_of",
    "measure_memory",
    "room_for_state",
    "share_of_memory",
    "stays_free",
]

_MARGIN = 4  # 1 / _MARGIN of a rank's memory stays free for activations, page cache and other processes
_SLACK = 8  # 1 / _SLACK of that may be used when memory is measured again, as other processes always use some
_MACHINE, _PROMISED = "machine", "promised by the machine"
_USED_FIELDS = {"Max address space": "VmSize", "Max data size": "VmData"}  # in status, by limit
_NAME_COLUMNS = 25  # of each line of /proc/self/limits
_NEVER_BEYOND = 2  # vm.overcommit_memory: the machine refuses what exceeds its limit


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
    def available(self) -> int:
        """Bytes that this rank alone could use."""
        return min(limit.available for limit in self.limits.values())

    @property
    def margin(self) -> int:
        """Bytes that stay free: a quarter of the rank's smallest limit."""
        return margin_of(min(limit.total for limit in self.limits.values()))


def margin_of(total: int) -> int:
    """Return the bytes of a memory of ``total`` bytes that state in memory leaves free."""
    return total // _MARGIN


def room_for_state(available: int, *, margin: int, reserved: int, ranks: int) -> int:
    """Return the bytes of optimizer state that each of some ranks may keep in the memory that they share.

    Args:
        available: Bytes that the ranks could use together.
        margin: Bytes of these that stay free.
        reserved: Bytes of these that the ranks will use for other purposes.
        ranks: Number of ranks.
    """
    return max(0, available - margin - reserved) // ranks


def measure_memory(*, reserved: int, root: Path = Path("/")) -> MemoryReport:
    """Read /proc/meminfo, the limits of this process's control groups, and those of the process itself.

    Args:
        reserved: As in :class:`MemoryReport`.
        root: Folder that contains ``proc`` and ``sys``.
    """
    fields = _fields(root / "proc/meminfo", separator=":")
    limits = {_MACHINE: MemoryLimit(fields.get("MemTotal", 0) * 1024, fields.get("MemAvailable", 0) * 1024)}
    if _NEVER_BEYOND in _numbers(root / "proc/sys/vm", ["overcommit_memory"]):
        total, used = (fields.get(name, 0) * 1024 for name in ("CommitLimit", "Committed_AS"))
        limits[_PROMISED] = MemoryLimit(total, total - used)
    limits |= {**dict(_group_limits(root)), **dict(_process_limits(root))}
    return MemoryReport(machine=machine_identity(), limits=limits, reserved=reserved)


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
    return room_for_state(
        min(rank.limits[name].available for rank in ranks),
        margin=max(rank.margin for rank in ranks),
        reserved=sum(rank.reserved for rank in ranks),
        ranks=len(ranks),
    )


def stays_free(reports: Sequence[MemoryReport], now: MemoryReport) -> bool:
    """Return whether margin and reserved memory are still free while the ranks allocate their shares.

    Other processes may have started after the shares were computed.

    Args:
        reports: Reports of all ranks from which the shares were computed.
        now: This rank's report of now. A limit that it has not had before is not considered.
    """
    for name, limit in now.limits.items():
        ranks = [report for report in reports if report.machine == now.machine and name in report.limits]
        margin = max((rank.margin for rank in ranks), default=0)
        if ranks and limit.available < margin - margin // _SLACK + sum(rank.reserved for rank in ranks):
            return False
    return True


class _Files(NamedTuple):
    """Names of the files and fields in which a version of control groups reports memory."""

    limits: tuple[str, ...]  # the smallest counts
    used: str
    inactive: str  # in memory.stat


_FILES = {
    1: _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    # Beyond memory.high the kernel reclaims memory and slows the group's processes down, as if they had no more.
    2: _Files(("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def _group_limits(root: Path) -> Iterator[tuple[str, MemoryLimit]]:
    """Yield the limits of the process's control groups and of their parents, each with its name."""
    for folder, version in control_groups("memory", root):
        files = _FILES[version]
        limits = list(_numbers(folder, files.limits))
        with suppress(OSError, ValueError):
            if limits:
                limit, used = min(limits), int((folder / files.used).read_text())
                # The memory in use includes inactive file pages, which the kernel reclaims when memory is needed.
                inactive = _fields(folder / "memory.stat").get(files.inactive, 0)
                yield _name_of(folder), MemoryLimit(limit, limit - used + inactive)


def _process_limits(root: Path) -> Iterator[tuple[str, MemoryLimit]]:
    """Yield the limits of this process, which it shares with no other one."""
    folder = root / "proc/self"
    used = _fields(folder / "status", separator=":")
    with suppress(OSError):
        # Containers have equal numbers of processes, but not an equal /proc.
        process = f"{os.stat(folder).st_dev}:{os.getpid()}"
        for line in (folder / "limits").read_text().splitlines():
            name = line[:_NAME_COLUMNS].strip()
            with suppress(ValueError, KeyError):  # there is no such limit, or it is "unlimited"
                limit = int(line[_NAME_COLUMNS:].split()[0])
                yield f"{name} of {process}", MemoryLimit(limit, limit - used[_USED_FIELDS[name]] * 1024)


def _numbers(folder: Path, names: Sequence[str]) -> Iterator[int]:
    """Yield the numbers in some files of a folder. A file may be missing or contain "max"."""
    for name in names:
        with suppress(OSError, ValueError):
            yield int((folder / name).read_text())


def _name_of(path: Path) -> str:
    """Return a name that all containers of a machine agree on: each may see its own group as "/"."""
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}"


def _fields(path: Path, *, separator: str | None = None) -> dict[str, int]:
    fields = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(separator or " ")
            with suppress(ValueError, IndexError):
                fields[name] = int(value.split()[0])
    return fields
