"""Machines are identified by more than their host names, and processes may use less than all cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from lightning_smartinfinity.common import machine
from lightning_smartinfinity.common.machine import available_cores, machine_identity


def booted(monkeypatch: pytest.MonkeyPatch, path: Path, boot: str, *, name: str) -> str:
    """Return the identity of a machine with this name and boot id."""
    path.write_text(f"{boot}\n")
    monkeypatch.setattr(machine, "_BOOT_ID", path)
    monkeypatch.setattr(platform, "node", lambda: name)
    return machine_identity()


def test_machines_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied images with one name are two machines. A container with its own name belongs to its host."""
    first, second, container = (
        booted(monkeypatch, tmp_path / "boot_id", boot, name=name)
        for boot, name in (("1", "localhost"), ("2", "localhost"), ("1", "container"))
    )
    assert first != second and first == container


@pytest.mark.parametrize("content", [None, "\n"])
def test_a_kernel_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    """The host name identifies the machine if the kernel gives no boot id."""
    path = tmp_path / "boot_id"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(machine, "_BOOT_ID", path)
    assert machine_identity() == platform.node() != ""


def test_this_machine() -> None:
    """The identity stays the same, and is the boot id where there is one."""
    assert machine_identity() == machine_identity()
    assert machine_identity() == (
        machine._BOOT_ID.read_text().strip() if machine._BOOT_ID.exists() else platform.node()
    )


QUOTAS: dict[str, tuple[str, dict[str, str], int]] = {
    "no control groups": ("", {}, 8),
    "no quota": ("0::/a", {"a/cpu.max": "max 100000"}, 8),
    "an outer group's quota": ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
    "less than a core": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "version 1": ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    "a quota of version 1": (
        "3:cpu,cpuacct:/",
        {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"},
        3,
    ),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_cores_of_a_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are those of the affinity mask, or the whole cores of the smallest quota."""
    line, files, cores = QUOTAS[name]
    for path, text in {"proc/self/cgroup": line, **{f"sys/fs/cgroup/{each}": files[each] for each in files}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n" if text else "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert available_cores(tmp_path) == cores
