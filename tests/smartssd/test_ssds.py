"""The SSD below a storage folder, and the layers in between that are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_smartinfinity import ConfigError
from lightning_smartinfinity.devices.smartssd.discovery.ssds import ssd_of
from tests.smartssd.fake_machine import Machine

CONTROLLER, OTHER = "pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:00/0000:00:02.0/0000:02:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(("kind", "partition"), [("ext4", ""), ("xfs", "p1"), ("ext4", "p12")])
def test_file_systems_on_disks_and_partitions(machine: Machine, tmp_path: Path, kind: str, partition: str) -> None:
    """A file system on a disk or a partition leads to the controller's PCI path and the whole disk's name.

    A storage folder may be a link to where the SSD is mounted.
    """
    machine.ssd(CONTROLLER, "nvme11", partition=partition, device="259:5")
    machine.mount("/data/a b", "259:5", kind=kind)
    (tmp_path / "link").symlink_to("/data/a b")
    for folder in ("/data/a b/not/there/yet", tmp_path / "link/state"):
        ssd = ssd_of(machine.system(), Path(folder))
        assert (ssd.name, ssd.path.address, ssd.file_system) == ("nvme11n1", "0000:01:00.0", kind)
        assert ssd.path.steps == ("pci0000:00", "0000:00:01.0", "0000:01:00.0")


def test_later_and_deeper_mounts_cover_earlier_ones(machine: Machine) -> None:
    """A path lies on its deepest mount, whose name may be no text, and on the later of two mounts at one point."""
    machine.ssd(CONTROLLER, "nvme0", device="259:0")
    machine.ssd(OTHER, "nvme1", device="259:1")
    machine.mount("/mnt", "0:33", kind="tmpfs", source="tmpfs")
    machine.mount("/mnt/a", "0:34", kind="nfs4", source="server:/a")
    machine.mount("/mnt/a", "259:0")
    machine.mount("/mnt/a/b", "259:1")
    latin = machine.mount(os.fsdecode(b"/mnt/caf\xe9"), "259:0")
    system = machine.system()
    assert ssd_of(system, Path("/mnt/a/x")).name == ssd_of(system, latin / "state").name == "nvme0n1"
    assert ssd_of(system, Path("/mnt/a/b/x")).name == "nvme1n1"
    with pytest.raises(ConfigError, match="tmpfs, which is in memory"):
        ssd_of(system, Path("/mnt/ab"))


Layer = Callable[[Machine], object]


def of_kind(kind: str) -> Layer:
    return lambda machine: machine.mount("/mnt/a", "0:41", kind=kind, source="something")


def mapped(uuid: str | None) -> Layer:
    def prepare(machine: Machine) -> None:
        folder = machine.virtual("dm-3", "253:3")
        if uuid is not None:
            _made(folder / "dm").joinpath("uuid").write_text(f"{uuid}\n")
        machine.mount("/mnt/a", "253:3", source="/dev/mapper/vg-state")

    return prepare


def virtual(name: str, kind: str, partition: str = "") -> Layer:
    """Return a function that adds a virtual disk of a kind, and mounts it, or a partition of it."""

    def prepare(machine: Machine) -> None:
        whole = machine.virtual(name, "9:0")
        _made(whole / kind)
        if partition:
            _made(whole / partition).joinpath("partition").write_text("1\n")
            machine.block("259:9", whole / partition)
        machine.mount("/mnt/a", "259:9" if partition else "9:0", source=f"/dev/{name}")

    return prepare


def sata(machine: Machine) -> None:
    machine.block("8:0", _made(machine.sysfs / "devices/pci0000:00/0000:00:17.0/ata1/host0/block/sda"))
    machine.mount("/mnt/a", "8:0", source="/dev/sda")


def over_fabrics(machine: Machine) -> None:
    controller = _made(machine.sysfs / "devices/virtual/nvme-fabrics/ctl/nvme5")
    (controller / "transport").write_text("tcp\n")
    machine.block("259:0", _made(controller / "nvme5n1"))
    machine.mount("/mnt/a", "259:0")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (of_kind("btrfs"), "is on btrfs"),
        (of_kind("zfs"), "is on zfs"),
        (of_kind("tmpfs"), "in memory"),
        (of_kind("overlay"), "container"),
        (of_kind("nfs4"), "nfs4, a network"),
        (of_kind("fuse.sshfs"), "fuse.sshfs, a network or user-space"),
        (mapped("LVM-abc"), "/dev/mapper/vg-state.*LVM (dm-3)"),
        (mapped("CRYPT-LUKS2-abc-cr"), "/dev/mapper/vg-state.*dm-crypt (dm-3)"),
        (mapped("mpath-abc"), "/dev/mapper/vg-state.*multipath"),
        (mapped("part1-mpath-abc"), "a device-mapper target (dm-3)"),
        (mapped(None), "a device-mapper target (dm-3)"),
        (virtual("md127", "md"), "software RAID, md (md127)"),
        (virtual("md0", "md", "md0p1"), "software RAID, md (md0)"),  # a partition is judged by its whole disk
        (virtual("loop0", "loop"), "a loop device (loop0)"),
        (sata, "no NVMe SSD (sda)"),
        (lambda machine: machine.mount("/mnt/a", "259:77"), "259:77 is not in sysfs"),
        (over_fabrics, "an NVMe namespace over tcp without a PCI function"),
    ],
)
def test_other_layers_are_refused_by_name(machine: Machine, layer: Layer, words: str) -> None:
    """What moves blocks around, or keeps them in memory or elsewhere, is refused by name."""
    layer(machine)
    with pytest.raises(ConfigError) as caught:
        ssd_of(machine.system(), Path("/mnt/a"))
    assert all(word in caught.value.problem for word in ("/mnt/a", *words.split(".*")))
    assert "update_device='host'" in caught.value.remedy


def test_native_multipath(machine: Machine) -> None:
    """With native multipath, a disk with one controller is found, and one with several controllers is refused.

    The disk then lies below a virtual subsystem that links to its controllers.
    """
    subsystem = _made(machine.sysfs / "devices/virtual/nvme-subsystem/nvme-subsys0")
    machine.block("259:0", _made(subsystem / "nvme0n1"))
    machine.mount("/mnt/a", "259:0")
    (subsystem / "nvme0").symlink_to(_made(machine.function(CONTROLLER, kind="0x010802") / "nvme/nvme0"))
    assert ssd_of(machine.system(), Path("/mnt/a")).path.address == "0000:01:00.0"
    (subsystem / "nvme1").symlink_to(_made(machine.function(OTHER, kind="0x010802") / "nvme/nvme1"))
    with pytest.raises(ConfigError, match=r"several controllers lead to \(0000:01:00\.0, 0000:02:00\.0\)"):
        ssd_of(machine.system(), Path("/mnt/a"))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
