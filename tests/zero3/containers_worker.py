"""Runs one of two ranks of a machine, each in a container with its own host name: ``... containers_worker FOLDER``.

Every rank writes ``FOLDER/rank<n>.json``: the bytes of its resident tasklets in each case, and the error, if any, of
its request for disk space.
``FOLDER/<case>/rank<n>`` holds the ``proc`` and ``sys`` that the rank sees.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from lightning_smartinfinity import StorageFullError, TransferConfig
from lightning_smartinfinity.pipeline.layout.free_memory import measure_memory
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, build_layout
from lightning_smartinfinity.storage import measure_gradient_space, require_space
from lightning_smartinfinity.zero3.ranks.collectives import gather
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup import open_storage as storage

CASES = ("one limit", "a limit each")
NUMEL = 5 << 26
"""Number of parameters of each rank. Their state is 3.75 GiB, which fits into memory in no case."""
FREE_DISK_BYTES = 1 << 30
WANTED_BYTES = 3 * FREE_DISK_BYTES // 5
"""Fits on the disk once, but not twice."""


def cached_bytes(root: Path) -> int:
    """Return how many bytes this rank caches in memory with ``dram_cache_bytes="auto"``."""
    whole = ParameterSlice(name="all", numel=NUMEL, real_numel=NUMEL, group=0, sub_group=0)
    settings = OffloadSettings(storage=(root,), transfer=TransferConfig(dram_cache_bytes="auto", num_buffers=2))
    layout = build_layout(
        [whole],
        tasklet_bytes=settings.tasklet_bytes,
        num_arrays=3,
        num_devices=1,
        places_per_tasklet=2,
        state_format="fp32",
    )
    with mock.patch.object(storage, "measure_memory", partial(measure_memory, root=root)):
        cached = storage.with_cache(layout, settings, None)
    return sum(extent.nbytes for extent in cached.extents.extents[: cached.num_resident])


def disk_refusal(folder: Path) -> str | None:
    """Return the error that two ranks get when each wants ``WANTED_BYTES`` of one file system, or None."""
    requests = measure_gradient_space([folder], nbytes=WANTED_BYTES)
    try:
        require_space(request for of_rank in gather(requests, None) for request in of_rank)
    except StorageFullError as error:
        return str(error)
    return None


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    name = f"container-{rank}"
    disk: Any = SimpleNamespace(f_bavail=FREE_DISK_BYTES, f_frsize=1)
    with (
        mock.patch.object(platform, "node", return_value=name),
        mock.patch.object(socket, "gethostname", return_value=name),
        mock.patch.object(os, "statvfs", return_value=disk),
    ):
        found = {
            "name": platform.node(),
            "cached": {case: cached_bytes(folder / case / f"rank{rank}") for case in CASES},
            "disk": disk_refusal(folder),
        }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
