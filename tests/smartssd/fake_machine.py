"""A machine made of files: sysfs, mountinfo and device nodes in the layout of Linux and XRT's driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lightning_smartinfinity.devices.smartssd import System

GIB = 1 << 30
SHELL = "xilinx_u2_gen3x4_xdma_gc_base_2"
XOCL = "2.13.466,f5505e402c2ca1ffe45eb6d3a9399b23a0dc8776"


@dataclass
class Machine:
    """The hardware added so far. :meth:`system` returns it as the package sees it."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    mounts: list[str] = field(default_factory=list)
    locked: set[Path] = field(default_factory=set)

    @property
    def sysfs(self) -> Path:
        return self.root / "sys"

    def system(self) -> System:
        mountinfo = self.root / "mountinfo"
        root = "1 0 252:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw"
        mountinfo.write_text("\n".join([root, *self.mounts]) + "\n", errors="surrogateescape")
        return System(
            sysfs=self.sysfs,
            mountinfo=mountinfo,
            maps=self.root / "maps",
            dev=self.root / "dev",
            environment=self.environment,
            may_use=lambda node: node.exists() and node not in self.locked,
        )

    def function(self, path: str, *, kind: str, vendor: str = "0x144d") -> Path:
        """Add a PCI function, such as ``"pci0000:3a/0000:3a:00.0/0000:3b:00.0"``, with the bridges above it."""
        folder = self.sysfs / "devices" / path
        _write(folder / "class", kind)
        _write(folder / "vendor", vendor)
        _link(self.sysfs / "bus/pci/devices" / folder.name, folder)
        return folder

    def card(
        self,
        path: str,
        *,
        p2p: str | None = f"bar:{4 * GIB}\nexp_bar:{4 * GIB}",
        driver: bool = True,
        minor: int = 128,
        shell: str = SHELL,
    ) -> Path:
        """Add the user function of an FPGA."""
        folder = self.function(path, kind="0x120000", vendor="0x10ee")
        if not driver:
            return folder
        drivers = self.sysfs / "bus/pci/drivers/xocl"
        _link(drivers / folder.name, folder)
        _link(folder / "driver", drivers)
        _write(drivers / "bind")
        _write(drivers / "module/version", XOCL)
        _write(folder / "rom.u.4194304/VBNV", shell)
        if p2p is not None:
            _write(folder / "p2p.u.12582912/config", p2p)
        (folder / f"drm/renderD{minor}").mkdir(parents=True)
        _write(self.root / f"dev/dri/renderD{minor}")
        return folder

    def ssd(self, path: str, name: str = "nvme0", *, partition: str = "", device: str = "259:0") -> Path:
        """Add an NVMe controller with one namespace, and with a partition if one is named."""
        folder = self.function(path, kind="0x010802")
        block = folder / "nvme" / name / f"{name}n1"
        block.mkdir(parents=True)
        if partition:
            block = block / f"{name}n1{partition}"
            _write(block / "partition", "1")
        self.block(device, block)
        return folder

    def block(self, device: str, folder: Path) -> None:
        """Give a block device its major and minor numbers."""
        _link(self.sysfs / "dev/block" / device, folder)

    def virtual(self, name: str, device: str) -> Path:
        """Add a block device that belongs to no hardware."""
        folder = self.sysfs / "devices/virtual/block" / name
        folder.mkdir(parents=True)
        self.block(device, folder)
        return folder

    def mount(self, point: str, device: str, *, kind: str = "ext4", source: str = "/dev/nvme0n1p1") -> Path:
        """Mount a device and return the mount point, which need not exist."""
        escaped = point.replace("\\", "\\134").replace(" ", "\\040")
        # Any number of optional fields may stand before the dash.
        self.mounts.append(f"36 1 {device} / {escaped} rw,noatime shared:7 master:1 - {kind} {source} rw")
        return Path(point)


def smartssd(machine: Machine, number: int, *, mounted: str = "", upstream: str = "pci0000:3a/0000:3a:00.0") -> None:
    """Add one SmartSSD: a switch with the FPGA on one port and the SSD on the other."""
    bus = 0x40 + 0x10 * number
    switch = f"{upstream}/0000:{bus:02x}:00.0"
    machine.card(f"{switch}/0000:{bus + 1:02x}:00.0/0000:{bus + 2:02x}:00.1", minor=128 + number)
    machine.ssd(f"{switch}/0000:{bus + 1:02x}:01.0/0000:{bus + 3:02x}:00.0", f"nvme{number}", device=f"259:{number}")
    if mounted:
        machine.mount(mounted, f"259:{number}", source=f"/dev/nvme{number}n1")


def _write(file: Path, *lines: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
