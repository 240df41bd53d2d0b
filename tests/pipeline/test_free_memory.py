"""The free memory that dram_cache_bytes="auto" finds on simulated machines."""

from __future__ import annotations

import platform
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.common.machine import machine_identity
from lightning_smartinfinity.pipeline.layout.free_memory import (
    MemoryLimit,
    MemoryReport,
    measure_memory,
    share_of_memory,
)

GIB = 2**30


def machine(
    root: Path, *, group: str | None = None, line: str = "0::", proc: Mapping[str, str] = {}, **limits: dict[str, str]
) -> Path:
    for name in ("self/status", *proc):
        (root / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "proc" / name).write_text(proc.get(name, ""))
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  1 kB\n"
        f"MemAvailable:   {40 * GIB // 1024} kB\nHugePages_Total: 0\n"
        f"CommitLimit:    {32 * GIB // 1024} kB\nCommitted_AS:    {9 * GIB // 1024} kB\n"
    )
    if group is not None:
        (root / "proc/self/cgroup").write_text(f"1:cpu:/other\n{line}{group}\n")
    for folder, files in limits.items():
        path = root / "sys/fs/cgroup" / folder.replace("root", "").replace("__", "/")
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(text)
    return root


NO_LIMIT = 9223372036854771712  # as version 1 reports it
MACHINES: dict[str, tuple[dict[str, Any], list[MemoryLimit]]] = {
    # MemAvailable is the free memory, not MemFree.
    "no limits": ({}, []),
    # The limit of an outer control group counts too. Inactive file pages count as available.
    "a container": (
        {
            "group": "/a/b",
            "a": {
                "memory.max": f"{16 * GIB}\n",
                "memory.current": f"{10 * GIB}\n",
                "memory.stat": f"anon 7\ninactive_file {2 * GIB}\nactive_file 9\n",
            },
            "a__b": {"memory.max": "max\n", "memory.current": "1\n"},
        },
        [MemoryLimit(16 * GIB, 8 * GIB)],
    ),
    # Beyond memory.high a group is slowed down instead of killed, as systemd's MemoryHigh does.
    "a soft limit": (
        {
            "group": "/a/b",
            "a": {"memory.max": f"{32 * GIB}\n", "memory.high": "max\n", "memory.current": f"{2 * GIB}\n"},
            "a__b": {"memory.max": "max\n", "memory.high": f"{8 * GIB}\n", "memory.current": f"{GIB}\n"},
        },
        [MemoryLimit(8 * GIB, 7 * GIB), MemoryLimit(32 * GIB, 30 * GIB)],
    ),
    # The container's limit is at the top of the mounted hierarchy, as the process's path is the host's.
    "a container of version 1": (
        {
            "group": "/docker/abc",
            "line": "9:freezer,memory:",
            "memory": {
                "memory.limit_in_bytes": f"{16 * GIB}\n",
                "memory.usage_in_bytes": f"{10 * GIB}\n",
                "memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}\n",
            },
            "memory__docker__abc": {"memory.limit_in_bytes": f"{NO_LIMIT}\n", "memory.usage_in_bytes": "1\n"},
        },
        [MemoryLimit(NO_LIMIT, NO_LIMIT - 1), MemoryLimit(16 * GIB, 8 * GIB)],
    ),
    # Beyond CommitLimit this machine refuses memory, even if it is free: vm.overcommit_memory=2.
    "a machine that keeps its promises": (
        {"proc": {"sys/vm/overcommit_memory": "2\n"}},
        [MemoryLimit(32 * GIB, 23 * GIB)],
    ),
    # ulimit -d and ulimit -v.
    "a limited process": (
        {
            "proc": {
                "sys/vm/overcommit_memory": "0\n",
                "self/status": f"Name: python\nVmSize:\t{3 * GIB // 1024} kB\nVmData:\t{GIB // 1024} kB\n",
                "self/limits": f"{'Max data size':25} {6 * GIB:<20} unlimited            bytes\n"
                f"{'Max resident set':25} unlimited            unlimited            bytes\n"
                f"{'Max address space':25} {8 * GIB:<20} unlimited            bytes\n",
            }
        },
        [MemoryLimit(6 * GIB, 5 * GIB), MemoryLimit(8 * GIB, 5 * GIB)],
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_limits_of_a_machine(tmp_path: Path, name: str) -> None:
    """Limits of the machine and of control groups are found, with what they leave."""
    files, limits = MACHINES[name]
    report = measure_memory(reserved=5, root=machine(tmp_path, **files))
    assert (report.machine, report.reserved) == (machine_identity(), 5)
    assert list(report.limits.values()) == [MemoryLimit(64 * GIB, 40 * GIB), *limits]


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    """Without any memory information the cache is empty, and there is no error."""
    report = measure_memory(reserved=0, root=tmp_path)
    assert share_of_memory([report], report) == 0


@pytest.mark.parametrize(("groups", "share"), [(["both", "both"], 5 * GIB), (["first", "second"], 11 * GIB)])
def test_ranks_in_containers(tmp_path: Path, groups: list[str], share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are those of groups, whatever their path and the host name in a container: ranks in one share what it has.

    A quarter of 16 GiB stays free, beside the reserved GiB of each rank.
    """
    reports = []
    for name, group in zip(("one", "two"), groups, strict=True):
        root = machine(tmp_path / name, group="/")
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "memory.max").write_text(f"{16 * GIB}\n")
        (tmp_path / group / "memory.current").write_text("0\n")
        (root / "sys/fs").mkdir(parents=True)
        (root / "sys/fs/cgroup").symlink_to(tmp_path / group)
        monkeypatch.setattr(platform, "node", lambda name=name: name)
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        reports.append(measure_memory(reserved=GIB, root=root))
    assert [share_of_memory(reports, own) for own in reports] == [share, share]


def report_of(where: str, /, *, reserved: int = 0, **limits: tuple[int, int]) -> MemoryReport:
    """Return the report of a rank under these limits, each given as (total, available)."""
    return MemoryReport(
        machine=where, limits={name: MemoryLimit(*limit) for name, limit in limits.items()}, reserved=reserved
    )


@st.composite
def jobs(draw: st.DrawFn) -> list[MemoryReport]:
    """Generate ranks on machines with containers, some in a group with a limit, measured at various moments."""
    totals = {name: draw(st.integers(0, 400)) for name in ("machine", "pod", "first", "second", "third")}
    paths = [(), ("first",), ("pod", "second"), ("pod", "third")]
    ranks = []
    for _ in range(draw(st.integers(1, 8))):
        names = ("machine", *draw(st.sampled_from(paths)))
        limits = {name: (totals[name], draw(st.integers(0, totals[name]))) for name in names}
        ranks.append(report_of(draw(st.sampled_from(["one", "two"])), reserved=draw(st.integers(0, 20)), **limits))
    return ranks


def under(ranks: list[MemoryReport], machine: str, name: str) -> list[MemoryReport]:
    return [rank for rank in ranks if rank.machine == machine and name in rank.limits]


def room_for_caches(charged: list[MemoryReport], name: str) -> int:
    """Return what a limit leaves these ranks: a quarter of each rank's tightest limit stays free."""
    margin = max(min(limit.total for limit in rank.limits.values()) // 4 for rank in charged)
    available = min(rank.limits[name].available for rank in charged)
    return available - margin - sum(rank.reserved for rank in charged)


@given(jobs(), st.randoms())
def test_no_limit_is_exceeded(ranks: list[MemoryReport], order: random.Random) -> None:
    """Under every limit, caches and reserved memory fit and leave a quarter of each rank's tightest limit."""
    shuffled = list(ranks)
    order.shuffle(shuffled)
    for machine, name in {(rank.machine, name) for rank in ranks for name in rank.limits}:
        charged = under(ranks, machine, name)
        shares = [share_of_memory(ranks, own) for own in charged]
        assert shares == [share_of_memory(shuffled, own) for own in charged]
        assert min(shares) >= 0
        if max(shares) > 0:
            assert sum(shares) <= room_for_caches(charged, name)


@given(jobs())
def test_a_rank_is_charged_for_no_limit_but_its_own(ranks: list[MemoryReport]) -> None:
    """A rank's share is as large as its own limits allow.

    With one more byte for each rank under it, one of these limits would be exceeded.
    """
    for own in ranks:
        share, limits = share_of_memory(ranks, own), {name: under(ranks, own.machine, name) for name in own.limits}
        assert any(len(of) * (share + 1) > room_for_caches(of, name) for name, of in limits.items())
