"""What dram_cache_bytes="auto" finds free, on machines that the test makes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_smartinfinity.transfer.free_memory import MemoryReport, measure_memory, share_of_memory

GIB = 2**30


def machine(root: Path, *, group: str | None = None, line: str = "0::", **limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  1 kB\n"
        f"MemAvailable:   {40 * GIB // 1024} kB\nHugePages_Total: 0\n"
    )
    if group is not None:
        (root / "proc/self/cgroup").write_text(f"1:cpu:/other\n{line}{group}\n")
    for folder, files in limits.items():
        path = root / "sys/fs/cgroup" / folder.replace("root", "").replace("__", "/")
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(text)
    return root


def test_a_machine_without_limits(tmp_path: Path) -> None:
    """MemAvailable counts, not MemFree."""
    report = measure_memory(reserved=5, root=machine(tmp_path))
    assert (report.total, report.available, report.reserved) == (64 * GIB, 40 * GIB, 5)


def test_a_container(tmp_path: Path) -> None:
    """The limit of a control group above counts, too; pages of files that are given back are no use."""
    root = machine(
        tmp_path,
        group="/a/b",
        a={
            "memory.max": f"{16 * GIB}\n",
            "memory.current": f"{10 * GIB}\n",
            "memory.stat": f"anon 7\ninactive_file {2 * GIB}\nactive_file 9\n",
        },
        a__b={"memory.max": "max\n", "memory.current": "1\n"},
    )
    report = measure_memory(reserved=0, root=root)
    assert (report.total, report.available) == (16 * GIB, 8 * GIB)


def test_a_container_of_version_1(tmp_path: Path) -> None:
    """The path is that of the host; what counts is mounted at the top. A group without a limit has a huge one."""
    root = machine(
        tmp_path,
        group="/docker/abc",
        line="9:freezer,memory:",
        memory={
            "memory.limit_in_bytes": f"{16 * GIB}\n",
            "memory.usage_in_bytes": f"{10 * GIB}\n",
            "memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}\n",
        },
        memory__docker__abc={"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "1\n"},
    )
    report = measure_memory(reserved=0, root=root)
    assert (report.total, report.available) == (16 * GIB, 8 * GIB)


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    """No cache, no error."""
    report = measure_memory(reserved=0, root=tmp_path)
    assert share_of_memory([report], report.host) == 0


@pytest.mark.parametrize(("reserved", "share"), [(0, 7 * GIB), (GIB, 6 * GIB), (50 * GIB, 0)])
def test_ranks_share_a_machine(reserved: int, share: int) -> None:
    """Less a quarter of all memory and what each rank still takes; other machines do not count; in any order."""
    seen = [
        MemoryReport(host=host, total=40 * GIB, available=available, reserved=reserved)
        for host, available in (("one", 25 * GIB), ("two", GIB), ("one", 24 * GIB))
    ]
    assert share_of_memory(seen, "one") == share_of_memory(seen[::-1], "one") == share
