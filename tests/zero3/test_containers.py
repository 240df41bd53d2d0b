"""Two ranks of one machine whose containers have host names of their own share its disks and its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import run_module
from tests.zero3.containers_worker import CASES, NUMEL

GIB = 1 << 30
TASKLET_BYTES = 4 << 20
RESERVED = 4 * NUMEL + 2 * TASKLET_BYTES
"""Bytes of a rank's gradients and of its ring of buffers."""


def make_root(root: Path, group: Path | None) -> None:
    """Create a container's files: 16 GiB of memory, 12 GiB available, and the group, if any, with a 6 GiB limit."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs").mkdir(parents=True)
    if group is not None:
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(f"{6 * GIB}\n")
        (group / "memory.current").write_text("0\n")
        (root / "sys/fs/cgroup").symlink_to(group)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of the two ranks."""
    folder = tmp_path_factory.mktemp("containers")
    for case in CASES:
        for rank in range(2):
            shared = folder / case / "group"
            make_root(folder / case / f"rank{rank}", shared if case == "one limit" else Path(f"{shared}{rank}"))
    done = run_module("tests.zero3.containers_worker", folder, ranks=2)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert {rank["name"] for rank in found} == {"container-0", "container-1"}
    return found


def test_a_limit_is_shared_by_the_ranks_under_it(ranks: list[Any]) -> None:
    """Each rank takes half of what is left of the shared limit, less a quarter of the limit and both ranks' buffers."""
    share = (6 * GIB - 6 * GIB // 4 - 2 * RESERVED) // 2
    for rank in ranks:
        assert share - TASKLET_BYTES < rank["cached"]["one limit"] <= share


def test_a_limit_of_its_own_is_charged_once(ranks: list[Any]) -> None:
    """Each rank takes what its own limit leaves, because the machine's memory holds both."""
    share = 6 * GIB - 6 * GIB // 4 - RESERVED
    assert 2 * (share + RESERVED) <= 12 * GIB
    for rank in ranks:
        assert share - TASKLET_BYTES < rank["cached"]["a limit each"] <= share


def test_a_disk_is_shared(ranks: list[Any]) -> None:
    """Both ranks are refused when only one of their requests fits, and the error names both containers."""
    for rank in ranks:
        assert rank["disk"] is not None
        assert "1.20 GiB" in rank["disk"] and "where 1.00 GiB are free" in rank["disk"]
        assert "'container-0', 'container-1'" in rank["disk"]
