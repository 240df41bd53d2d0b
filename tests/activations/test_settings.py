"""Settings of ActivationOffload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.errors import ConfigError, StorageFullError
from lightning_smartinfinity.settings import activation_offload


def test_defaults_and_text() -> None:
    """Sizes may be text, and are kept as bytes. A dict of settings is as good as an instance."""
    assert ActivationOffload() == ActivationOffload(keep="auto", min_bytes=262144)
    settings = activation_offload({"keep": "1GB", "budget_bytes": "2GiB", "host_bytes": "64MiB"}, owner="x")
    assert settings == ActivationOffload(keep=10**9, budget_bytes=2 << 30, host_bytes=64 << 20)
    assert activation_offload(None, owner="x") is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"keep": -1}, "keep=-1"),
        ({"keep": "all"}, "keep='all'"),
        ({"keep": True}, "keep=True"),
        ({"budget_bytes": 4095}, "budget_bytes=4095"),
        ({"host_bytes": 0}, "host_bytes=0"),
        ({"storage_bytes": 1}, "storage_bytes=1"),
        ({"min_bytes": 0}, "min_bytes=0"),
        ({"verify": 1}, "verify=1"),
        ({"keep": 16384, "budget_bytes": 8192, "min_bytes": 1}, "keep=16384, budget_bytes=8192"),
        ({"host_bytes": 8192, "budget_bytes": 4096}, "host_bytes=8192, budget_bytes=4096"),
        ({"host_bytes": 8192, "min_bytes": 8193}, "host_bytes=8192, min_bytes=8193"),
        ({"storage_bytes": 8192, "min_bytes": 8193}, "storage_bytes=8192, min_bytes=8193"),
        ({"budget_bytes": 8191, "min_bytes": 1}, "budget_bytes=8191, min_bytes=1"),
        ({"host_bytes": 1 << 63}, f"host_bytes={1 << 63}"),
        ({"budget": 1}, "no setting 'budget'"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], named: str) -> None:
    """An error names the class, the value and what to do."""
    with pytest.raises(ConfigError, match=r"ActivationOffload.*") as raised:
        ActivationOffload(**settings)
    assert named in str(raised.value)


def test_sizes_of_which_one_tensor_fits() -> None:
    """Nothing is refused that moves one tensor of the least size."""
    ActivationOffload(host_bytes=12288, storage_bytes=12288, budget_bytes=12288, min_bytes=8193)
    ActivationOffload(budget_bytes=8192, min_bytes=1)


@pytest.mark.parametrize(
    ("folders", "settings", "named"),
    [
        (None, {}, r"OffloadedActivations\(folders=None\)"),
        ([], {}, r"OffloadedActivations\(folders=\[\]\)"),
        (7, {}, r"OffloadedActivations\(folders=7\)"),
        (["a", "a"], {}, r"OffloadedActivations\(folders=.*twice"),
        ("a", {"settings": 7}, r"OffloadedActivations\(settings=7\)"),
        ("a", {"settings": {"keep": -1}}, "keep=-1"),
        ("a", {"transfer": 7}, r"OffloadedActivations\(transfer=7\)"),
    ],
)
def test_what_the_context_manager_refuses(folders: Any, settings: dict[str, Any], named: str) -> None:
    """Folders and settings are checked as those of a strategy, by the names that they have here."""
    with pytest.raises(ConfigError, match=named):
        OffloadedActivations(folders, **settings)


def test_more_than_storage_has(tmp_path: Path) -> None:
    """Storage needs as much free space as activations may take when the files are opened. No file is left otherwise."""
    activations = OffloadedActivations(tmp_path / "new", settings={"storage_bytes": 1 << 60})
    with pytest.raises(StorageFullError, match=r"activations need .* are free") as raised:
        activations.open()
    assert "storage_bytes" in raised.value.remedy and not (tmp_path / "new").exists()
