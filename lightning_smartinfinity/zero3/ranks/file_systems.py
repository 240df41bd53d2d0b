"""Finds out which ranks' folders are the same, or on the same file system, regardless of where machines mount it.

A machine distinguishes its own folders by numbers, which mean nothing to another machine. Between machines a test file
decides: one rank creates it under a new name, and the others look for it. The name must never have been looked up
before, because network file systems cache for some time that a name does not exist.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.common.machine import machine_identity
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.storage.io.files import REMEMBERED, bounded, limited
from lightning_smartinfinity.storage.io.mounts import mount_of
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.state.space import nearest_existing
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together

__all__ = ["FolderLocation", "device_of", "first_seen", "places_of", "network_warning"]

_GLANCE = 0.1
_MADE = re.compile(r"\.smart-infinity-[0-9a-f]{32}")
_OLD_SECONDS = 3600.0  # much longer than the waits of all ranks for a slow disk
_OF_NETWORKS = {"9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "panfs", "smb3", "wekafs"}
_OF_NETWORKS |= {f"fuse.{name}" for name in ("cephfs", "gcsfuse", "glusterfs", "juicefs", "rclone", "s3fs", "sshfs")}


class FolderLocation(NamedTuple):
    """The place of a folder of this rank, which may be shared with other ranks.

    Args:
        number: Number of the place, the same for all folders of all ranks in it.
        leader: The lowest rank that has a folder there. It handles paths that ranks share.
        is_first_here: Whether this rank is the lowest one of its machine that has a folder there.
        num_machines: Number of machines whose ranks have folders there.
        is_certain: Whether a test file could be created there. If not, other machines may share the place unnoticed.
    """

    number: int
    leader: int
    is_first_here: bool
    num_machines: int
    is_certain: bool = True

    @property
    def may_be_shared(self) -> bool:
        """Whether other machines see the place, or may see it."""
        return self.num_machines > 1 or not self.is_certain


class _Spot(NamedTuple):
    """An existing folder, identified on one machine by the numbers of its file system and inode."""

    machine: str
    device: int
    inode: int
    folder: Path

    @property
    def key(self) -> tuple[str, int, int]:
        return self.machine, self.device, self.inode


def places_of(
    folders: Sequence[Path], group: ProcessGroup | None = None, *, by_device: bool = False
) -> list[FolderLocation]:
    """Return the places of folders, which need not exist yet. Collective.

    Two folders are in one place if one rank sees a file that the other has written to its folder, in its own folder or
    under the path of the other. Nothing is written if all ranks see the same folder.

    Args:
        folders: This rank's folders. Other ranks may pass different folders, and another number of them.
        group: Process group of all ranks.
        by_device: Whether all folders on one file system of a machine count as one place.

    Raises:
        StorageError: A folder cannot be examined; raised on every rank.
        StorageTimeoutError: A disk does not answer; raised on every rank.
    """
    own: list[_Spot] = []
    with raising_together(group):
        own = [_spot_of(each) for each in folders]
    spots = [(rank, spot) for rank, of_rank in enumerate(gather(own, group)) for spot in of_rank]
    firsts: dict[tuple[str, int, int], tuple[int, _Spot]] = {}
    for rank, spot in spots:
        firsts.setdefault(spot.key, (rank, spot))
    keys, pairs, probed = list(firsts), list[tuple[int, int]](), set(range(len(firsts)))
    is_one_machine = len({spot.machine for _, spot in spots}) == 1
    makes_files = len(keys) > 1 and not (by_device and is_one_machine)
    if makes_files:
        pairs, probed = _pairs(list(firsts.values()), group, by_device=by_device)
    if by_device:
        pairs += [(i, j) for j, other in enumerate(keys) for i in range(j) if keys[i][:2] == other[:2]]
    numbers = dict(zip(keys, _joined(len(keys), pairs), strict=True))
    places = []
    for spot in own:
        number = numbers[spot.key]
        there = [(rank, other) for rank, other in spots if numbers[other.key] == number]
        first_here = next(rank for rank, other in there if other.machine == spot.machine)
        places.append(
            FolderLocation(
                number=number,
                leader=there[0][0],
                is_first_here=first_here == dist.get_rank(group),
                num_machines=len({other.machine for _, other in there}),
                is_certain=any(keys.index(other.key) in probed for _, other in there),
            )
        )
        # Only the leader lists the folder: listing it elsewhere would change what that machine has cached of it.
        if makes_files and there[0][0] == dist.get_rank(group):
            with suppress(OSError, StorageError):
                _remove_old(spot.folder)
    return places


def device_of(path: Path) -> int:
    """Return this machine's device number of the file system of a path, which need not exist yet.

    Raises:
        StorageError: The path cannot be examined.
        StorageTimeoutError: The disk does not answer.
    """
    return _spot_of(path).device


def network_warning(folders: Sequence[Path]) -> str | None:
    """Return a warning if one of the folders, used in every step, is on a network file system; else None."""
    for folder in folders:
        mount = mount_of(folder)
        if mount is not None and mount.kind in _OF_NETWORKS:
            return (
                f"{str(folder)!r} on {platform.node()} is on a network file system ({mount.kind}, {mount.source}): "
                "the optimizer state would cross the network at every step. Pass a folder on a drive of each machine, "
                "such as storage='/mnt/nvme' or storage='$SLURM_TMPDIR'."
            )
    return None


def first_seen(paths: Iterable[Path], *, shared: bool) -> Path | None:
    """Return the first of these paths that this rank sees; None if it sees none.

    Args:
        paths: Possible paths of one existing file or folder; machines may mount it at different paths.
        shared: Whether another machine may have created it. This machine may then cache for some time that the path
            does not exist, so this waits up to :data:`~lightning_smartinfinity.storage.io.files.REMEMBERED` seconds.
    """
    paths = list(paths)
    deadline = time.monotonic() + (REMEMBERED if shared else 0)
    while True:
        for path in paths:
            if _exists(path):
                return path
        if time.monotonic() >= deadline:
            return None
        time.sleep(_GLANCE)


@bounded("Looking at")
def _exists(path: Path) -> bool:
    if path.exists():
        return True
    with suppress(OSError):  # listing makes some file systems look again
        os.listdir(path.parent)
    return path.exists()


@bounded("Looking at")
def _spot_of(folder: Path) -> _Spot:
    # Links stay unresolved: they may lead to another mount point on another machine.
    existing = nearest_existing(Path(os.path.abspath(folder)))
    with storage_errors("Looking at", existing):
        status = os.stat(existing)
    return _Spot(machine_identity(), status.st_dev, status.st_ino, existing)


def _pairs(
    firsts: Sequence[tuple[int, _Spot]], group: ProcessGroup | None, *, by_device: bool
) -> tuple[list[tuple[int, int]], set[int]]:
    """Return pairs of spots in which a file written to one is seen from the other, and the set of writable spots.

    Spots are given by their indices in ``firsts``. Collective.

    Args:
        firsts: The spots, each with the first rank that has a folder there.
        group: Process group of all ranks.
        by_device: Whether it suffices that both spots are on one file system.
    """
    own = [number for number, (first, _) in enumerate(firsts) if first == dist.get_rank(group)]
    made: dict[int, Path] = {}
    with ExitStack() as files:
        with raising_together(group):
            for number in own:
                file = files.enter_context(_file_in(firsts[number][1].folder))
                if file is not None:
                    made[number] = file
        everywhere = {number: path for of_rank in gather(made, group) for number, path in of_rank.items()}
        seen: list[tuple[int, int]] = []
        with raising_together(group):
            for number, path in everywhere.items():
                device = _device_of_file(path)
                for other in own:
                    spot = firsts[other][1]
                    there = spot.device == device and (by_device or _is_on_the_way(spot.folder, path.parent))
                    if there or (other != number and _device_of_file(spot.folder / path.name) is not None):
                        seen.append((number, other))
        return list(chain.from_iterable(gather(seen, group))), set(everywhere)


def _is_on_the_way(one: Path, other: Path) -> bool:
    """Return whether two folders are equal, or one contains the other.

    Both are the nearest existing folder of the same path. A rank that looked earlier, or has cached that a folder does
    not exist, finds one further up.
    """
    return one == other or one in other.parents or other in one.parents


@bounded("Looking at")
def _device_of_file(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None


@contextmanager
def _file_in(folder: Path) -> Iterator[Path | None]:
    """Yield the path of a new test file for other ranks to look for; None if it cannot be created."""
    path = folder / f".smart-infinity-{uuid.uuid4().hex}"
    try:
        limited("Creating a file in", folder, path.touch, exist_ok=False)
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        with suppress(OSError, StorageError):
            limited("Removing a file from", folder, path.unlink)


@bounded("Removing old files from")
def _remove_old(folder: Path) -> None:
    """Remove old test files that killed processes have left in a folder."""
    with suppress(OSError), os.scandir(folder) as entries:
        now = folder.stat().st_mtime  # on the file system's clock
        for entry in entries:
            if _MADE.fullmatch(entry.name) and _is_old(entry.stat(follow_symlinks=False), now):
                os.unlink(entry)


def _is_old(status: os.stat_result, now: float) -> bool:
    """Return whether this user created a test file so long ago that no rank looks for it any more."""
    is_ours = stat.S_ISREG(status.st_mode) and status.st_size == 0 and status.st_uid == os.geteuid()
    return is_ours and now - status.st_mtime > _OLD_SECONDS


def _joined(num: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Return for each of ``num`` spots the smallest number of all spots that pairs connect it with."""
    numbers = list(range(num))
    for one, other in pairs:
        low, high = sorted((numbers[one], numbers[other]))
        numbers = [low if number == high else number for number in numbers]
    return numbers
