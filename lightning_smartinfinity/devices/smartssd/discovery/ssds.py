"""Finds the NVMe SSD of a storage folder, or raises an error that names the layer between folder and SSD."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.devices.smartssd.discovery.pci import PciPath, functions_of_class, path_of
from lightning_smartinfinity.devices.smartssd.discovery.system import System, entries_of, text_of
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.storage.io.mounts import IN_MEMORY, Mount, mount_of

__all__ = ["Ssd", "all_ssds", "ssd_of"]

_NVME_CLASS = "0x0108"
_FILE_SYSTEMS = ("ext4", "xfs")
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "glusterfs", "afs"})
_MAPPED = {
    "LVM-": "LVM",
    "CRYPT-": "dm-crypt",
    "mpath-": "device-mapper multipath",
    "DMRAID-": "dm-raid",
}
_REMEDY = "Put the folder on ext4 or XFS right on a SmartSSD's NVMe (or a partition), or use update_device='host'."


class Ssd(NamedTuple):
    """The SSD that holds a storage folder.

    Args:
        folder: The folder.
        name: Name of the whole disk's block device, such as ``"nvme0n1"``.
        path: PCI path of its controller.
        file_system: Type of the folder's file system.
    """

    folder: Path
    name: str
    path: PciPath
    file_system: str


def ssd_of(system: System, folder: Path) -> Ssd:
    """Return the SSD that holds a folder.

    Raises:
        ConfigError: The file system is neither ext4 nor XFS, or is not directly on a PCIe NVMe SSD.
    """
    mount = mount_of(folder, system.mountinfo)
    if mount is None:
        raise _refused(folder, "is on no mount that this process sees")
    _require_file_system(folder, mount)
    block = (system.sysfs / "dev/block" / mount.device).resolve()
    if not block.is_dir():
        raise _refused(folder, f"is on {mount.source}, whose block device {mount.device} is not in sysfs")
    disk = block.parent if (block / "partition").exists() else block
    between = _between(disk)
    if between is not None:
        raise _refused(folder, f"is on {mount.source}, which is {between}")
    return Ssd(folder, disk.name, _controller_of(system, folder, disk), mount.kind)


def all_ssds(system: System) -> list[PciPath]:
    """Return the controllers of all NVMe SSDs of the machine."""
    found = [path_of(function) for function in functions_of_class(system, _NVME_CLASS)]
    return [path for path in found if path is not None]


def _require_file_system(folder: Path, mount: Mount) -> None:
    if mount.kind in _FILE_SYSTEMS:
        return
    if mount.kind in _NETWORK or mount.kind.startswith("fuse"):
        described = f"{mount.kind}, a network or user-space file system"
    elif mount.kind in IN_MEMORY:
        described = f"{mount.kind}, which is in memory"
    elif mount.kind == "overlay":
        described = "overlay, a container's own file system"
    else:
        described = mount.kind
    raise _refused(folder, f"is on {described}")


def _between(disk: Path) -> str | None:
    """Describe the layer between the file system and an NVMe SSD, or the other device; ``None`` if there is none."""
    if disk.name.startswith("dm-"):
        uuid = text_of(disk / "dm/uuid") or ""
        kind = next((name for prefix, name in _MAPPED.items() if uuid.startswith(prefix)), "a device-mapper target")
        return f"{kind} ({disk.name})"
    if (disk / "md").is_dir():
        return f"a Linux software RAID, md ({disk.name})"
    if (disk / "loop").is_dir():
        return f"a loop device ({disk.name})"
    if not re.fullmatch(r"nvme\d+n\d+", disk.name):
        return f"no NVMe SSD ({disk.name})"
    return None


def _controller_of(system: System, folder: Path, disk: Path) -> PciPath:
    paths = {path for controller in _controllers(disk) if (path := path_of(controller)) is not None}
    if len(paths) == 1:
        return paths.pop()
    if paths:
        listed = ", ".join(sorted(path.address for path in paths))
        raise _refused(folder, f"is on {disk.name}, which several controllers lead to ({listed})")
    transports = {text_of(controller / "transport") for controller in _controllers(disk)} - {None}
    over = f" over {', '.join(sorted(map(str, transports)))}" if transports else ""
    raise _refused(folder, f"is on {disk.name}, an NVMe namespace{over} without a PCI function")


def _controllers(disk: Path) -> list[Path]:
    """Return the controllers of a disk: its parent or, with native multipath, the links in its virtual subsystem."""
    if disk.parent.parent.name == "nvme-subsystem":
        return [entry for entry in entries_of(disk.parent) if re.fullmatch(r"nvme\d+", entry.name)]
    return [disk.parent]


def _refused(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"The storage folder {str(folder)!r} {why}: a SmartSSD cannot reach it past the host.", _REMEDY)
