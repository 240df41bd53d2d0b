"""Machines are identified by more than their host names."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from lightning_smartinfinity.common import machine
from lightning_smartinfinity.common.machine import machine_identity


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
