"""Two ranks of one machine whose containers have host names of their own share its disks and its memory."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from lightning_smartinfinity import StorageFullError, TransferConfig
from lightning_smartinfinity.pipeline.layout.free_memory import measure_memory
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, build_layout
from lightning_smartinfinity.storage import measure_gradient_space, require_space
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup import open_storage

GIB = 1 << 30
NUMEL = 5 << 26
"""Number of parameters of each rank. Their state is 3.75 GiB, which fits into memory in no case."""
TASKLET_BYTES = 4 << 20
RESERVED = 4 * NUMEL + 2 * TASKLET_BYTES
"""Bytes of a rank's gradients and of its ring of buffers."""


@contextmanager
def container(rank: int) -> Iterator[None]:
    """Give the machine the host name of a rank's container."""
    name = f"container-{rank}"
    with (
        mock.patch.object(platform, "node", return_value=name),
        mock.patch.object(socket, "gethostname", return_value=name),
    ):
        yield


def make_root(root: Path, group: Path) -> Path:
    """Create a container's files: 16 GiB of memory, 12 GiB available, and its group with a limit of 6 GiB."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs").mkdir(parents=True)
    group.mkdir(exist_ok=True)
    (group / "memory.max").write_text(f"{6 * GIB}\n")
    (group / "memory.current").write_text("0\n")
    (root / "sys/fs/cgroup").symlink_to(group)
    return root


def cached_bytes(rank: int, roots: Sequence[Path]) -> int:
    """Return how many bytes a rank caches in memory with ``dram_cache_bytes="auto"``."""
    settings = OffloadSettings(storage=(roots[rank],), transfer=TransferConfig(dram_cache_bytes="auto", num_buffers=2))
    layout = build_layout(
        [ParameterSlice(name="all", numel=NUMEL, real_numel=NUMEL, group=0, sub_group=0)],
        tasklet_bytes=settings.tasklet_bytes,
        num_arrays=3,
        num_devices=1,
        places_per_tasklet=2,
        state_format="fp32",
    )

    def gathered(own: Any, group: None) -> list[Any]:
        reports = []
        for other, root in enumerate(roots):
            with container(other):
                reports.append(measure_memory(reserved=own.reserved, root=root))
        return reports

    with (
        container(rank),
        mock.patch.object(open_storage, "measure_memory", partial(measure_memory, root=roots[rank])),
        mock.patch.object(open_storage, "gather", gathered),
    ):
        cached = open_storage.with_cache(layout, settings, None)
    return sum(extent.nbytes for extent in cached.extents.extents[: cached.num_resident])


@pytest.mark.parametrize("shared", [True, False])
def test_limits_of_memory(tmp_path: Path, shared: bool) -> None:
    """Ranks under one limit share what it leaves beside a quarter and both ranks' buffers. One of its own counts once.

    The machine's memory holds both.
    """
    roots = [make_root(tmp_path / str(rank), tmp_path / f"group{rank * (not shared)}") for rank in range(2)]
    left = 6 * GIB - 6 * GIB // 4
    share = (left - 2 * RESERVED) // 2 if shared else left - RESERVED
    assert 2 * (share + RESERVED) <= 12 * GIB
    for rank in range(2):
        assert share - TASKLET_BYTES < cached_bytes(rank, roots) <= share


def test_a_disk_is_shared(tmp_path: Path) -> None:
    """Ranks are refused when only one of their requests fits, and the error names both containers."""
    requests: list[Any] = []
    with mock.patch.object(os, "statvfs", return_value=SimpleNamespace(f_bavail=GIB, f_frsize=1)):
        for rank in range(2):
            with container(rank):
                requests += measure_gradient_space([tmp_path], nbytes=3 * GIB // 5)
        require_space(requests[:1])
        with pytest.raises(StorageFullError, match=r"1\.20 GiB.* where 1\.00 GiB are free") as caught:
            require_space(requests)
    assert "'container-0', 'container-1'" in str(caught.value)
