"""Storage folders may name the machine, the process there and environment variables."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.settings.strategy import nvme_path_of
from lightning_smartinfinity.storage.io.mounts import Mount
from lightning_smartinfinity.zero3.ranks import file_systems
from lightning_smartinfinity.zero3.ranks.file_systems import network_warning
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit


def folders_of(*storage: str | Path) -> list[str]:
    return list(map(str, SmartInfinityStrategy(list(storage))._settings.storage or ()))


def test_what_a_path_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, the host name and the local rank are replaced, in strings and paths, and for parameters, too.

    One folder under two names is still one.
    """
    monkeypatch.setenv("SCRATCH", "/scratch/job 7")
    monkeypatch.setattr(platform, "node", lambda: "node3")
    for variable in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert folders_of("$SCRATCH/a", Path("${SCRATCH}/{node}")) == ["/scratch/job 7/a", "/scratch/job 7/node3"]
    assert folders_of("/mnt/nvme{local_rank}") == ["/mnt/nvme0"]
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert folders_of("/mnt/nvme{local_rank}") == ["/mnt/nvme2"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    zero = {"offload_param": {"device": "nvme", "nvme_path": "$SCRATCH/{local_rank}"}}
    assert nvme_path_of(zero, owner="SmartInfinityStrategy") == Path("/scratch/job 7/1")
    assert folders_of("/mnt/5$/{other}") == ["/mnt/5$/{other}"]
    with pytest.raises(ConfigError, match="twice"):
        folders_of("$SCRATCH", "/scratch/job 7")


@pytest.mark.parametrize("folder", ["$NOT_SET_HERE/a", "/mnt/${NOT_SET_HERE}", Path("/mnt/$NOT_SET_HERE")])
def test_a_variable_that_is_not_set(folder: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable and the machine; no folder of that name is made."""
    monkeypatch.setattr(platform, "node", lambda: "node3")
    assert "NOT_SET_HERE" not in os.environ
    with pytest.raises(ConfigError, match=r"names the environment variable \$\{?NOT_SET_HERE\}?, .* not set on node3"):
        SmartInfinityStrategy(folder)


def test_storage_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit warns once, with the folder, the file system and the remedy; a local disk has no warning."""
    assert network_warning([tmp_path]) is None
    mount = Mount(tmp_path, "nfs4", "0:99", "filer:/home")
    monkeypatch.setattr(file_systems, "mount_of", lambda folder: mount)
    with pytest.warns(UserWarning, match=r"network file system \(nfs4, filer:/home\): the .* at every step") as caught:
        fit(LitTiny(Recipe(max_steps=1)), tmp_path, max_steps=1)
    warned = [str(each.message) for each in caught if "network file system" in str(each.message)]
    assert len(warned) == 1 and str(tmp_path) in warned[0]
