"""The SSD below a storage folder, and the layers in between that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_smartinfinity import ConfigError
from lightning_smartinfinity.devices.smartssd.discovery.ssds import all_ssds, ssd_of
from tests.smartssd.fake_machine import Machine

CONTROLLER = "pci0000:00/0000:00:01.0/0000:01:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refusal(machine: Machine, folder: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ssd_of(machine.system(), Path(folder))
    assert folder in caught.value.problem and "update_device='host'" in caught.value.remedy
    return caught.value.problem


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("partition", ["", "p1", "p12"])
def test_file_systems_on_disks_and_partitions(machine: Machine, kind: str, partition: str) -> None:
    """A file system on a disk or a partition leads to the controller's PCI path and the whole disk's name."""
    machine.ssd(CONTROLLER, "nvme11", partition=partition, device="259:5")
    machine.mount("/data/a b", "259:5", kind=kind)
    ssd = ssd_of(machine.system(), Path("/data/a b/not/there/yet"))
    assert (ssd.name, ssd.path.address, ssd.file_system) == ("nvme11n1", "0000:01:00.0", kind)
    assert ssd.path.steps == ("pci0000:00", "0000:00:01.0", "0000:01:00.0")


def test_later_and_deeper_mounts_cover_earlier_ones(machine: Machine) -> None:
    """A path lies on its deepest mount, and on the later of two mounts at one point."""
    machine.ssd(CONTROLLER, "nvme0", device="259:0")
    machine.ssd("pci0000:00/0000:00:02.0/0000:02:00.0", "nvme1", device="259:1")
    machine.mount("/mnt", "0:33", kind="tmpfs", source="tmpfs")
    machine.mount("/mnt/a", "0:34", kind="nfs4", source="server:/a")
    machine.mount("/mnt/a", "259:0")
    machine.mount("/mnt/a/b", "259:1")
    system = machine.system()
    assert ssd_of(system, Path("/mnt/a/x")).name == "nvme0n1"
    assert ssd_of(system, Path("/mnt/a/b/x")).name == "nvme1n1"
    assert "tmpfs, which is in memory" in refusal(machine, "/mnt/ab")


def test_a_mount_whose_name_is_no_text(machine: Machine) -> None:
    """A folder below bytes that are not UTF-8 is found on its own mount, and not on the one above."""
    machine.ssd(CONTROLLER, "nvme0", device="259:0")
    machine.mount("/mnt", "0:33", kind="tmpfs", source="tmpfs")
    point = machine.mount(os.fsdecode(b"/mnt/caf\xe9"), "259:0")
    assert ssd_of(machine.system(), point / "state").name == "nvme0n1"


def test_links_are_followed(machine: Machine, tmp_path: Path) -> None:
    """A storage folder may be a link to where the SSD is mounted."""
    machine.ssd(CONTROLLER, device="259:0")
    point = machine.mount(str(tmp_path / "mount"), "259:0")
    point.mkdir()
    (tmp_path / "link").symlink_to(point)
    assert ssd_of(machine.system(), tmp_path / "link/state").name == "nvme0n1"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("btrfs", "lies on btrfs"),
        ("zfs", "lies on zfs"),
        ("tmpfs", "in memory"),
        ("overlay", "container"),
        ("nfs4", "nfs4, a network"),
        ("fuse.sshfs", "fuse.sshfs, a network or user-space"),
    ],
)
def test_other_file_systems_are_refused_by_name(machine: Machine, kind: str, words: str) -> None:
    """File systems that move blocks around, or keep them in memory or elsewhere, are refused by name."""
    machine.mount("/mnt/a", "0:41", kind=kind, source="something")
    assert words in refusal(machine, "/mnt/a")


@pytest.mark.parametrize(
    ("uuid", "words"),
    [
        ("LVM-abc", "LVM (dm-3)"),
        ("CRYPT-LUKS2-abc-cr", "dm-crypt (dm-3)"),
        ("mpath-abc", "multipath"),
        ("part1-mpath-abc", "a device-mapper target (dm-3)"),
        (None, "a device-mapper target (dm-3)"),
    ],
)
def test_mapped_devices_are_refused_by_name(machine: Machine, uuid: str | None, words: str) -> None:
    """A device-mapper target is named by the kind that its uuid tells."""
    folder = machine.virtual("dm-3", "253:3")
    if uuid is not None:
        (folder / "dm").mkdir()
        (folder / "dm/uuid").write_text(f"{uuid}\n")
    machine.mount("/mnt/a", "253:3", source="/dev/mapper/vg-state")
    problem = refusal(machine, "/mnt/a")
    assert words in problem and "/dev/mapper/vg-state" in problem


def test_raid_loops_and_other_disks_are_refused_by_name(machine: Machine) -> None:
    """Software RAID, loop devices and disks other than NVMe are refused by name."""
    (machine.virtual("md127", "9:127") / "md").mkdir()
    (machine.virtual("loop0", "7:0") / "loop").mkdir()
    machine.block("8:0", _made(machine.sysfs / "devices/pci0000:00/0000:00:17.0/ata1/host0/block/sda"))
    for device in ("9:127", "7:0", "8:0", "259:77"):
        machine.mount(f"/mnt/{device.replace(':', '-')}", device, source=f"/dev/{device}")
    assert "software RAID, md (md127)" in refusal(machine, "/mnt/9-127")
    assert "a loop device (loop0)" in refusal(machine, "/mnt/7-0")
    assert "no NVMe SSD (sda)" in refusal(machine, "/mnt/8-0")
    assert "259:77 sysfs does not know" in refusal(machine, "/mnt/259-77")


def test_partitions_of_a_raid_are_refused_too(machine: Machine) -> None:
    """A partition is judged by its whole disk."""
    whole = machine.virtual("md0", "9:0")
    (whole / "md").mkdir()
    (whole / "md0p1").mkdir()
    (whole / "md0p1/partition").write_text("1\n")
    machine.block("259:9", whole / "md0p1")
    machine.mount("/mnt/a", "259:9", source="/dev/md0p1")
    assert "software RAID, md (md0)" in refusal(machine, "/mnt/a")


def test_native_multipath(machine: Machine) -> None:
    """With native multipath, a disk with one controller is found, and one with several controllers is refused.

    The disk then lies below a virtual subsystem that links to its controllers.
    """
    controller = _made(machine.function(CONTROLLER, kind="0x010802") / "nvme/nvme0")
    subsystem = _made(machine.sysfs / "devices/virtual/nvme-subsystem/nvme-subsys0")
    (subsystem / "nvme0").symlink_to(controller)
    machine.block("259:0", _made(subsystem / "nvme0n1"))
    machine.mount("/mnt/a", "259:0")
    assert ssd_of(machine.system(), Path("/mnt/a")).path.address == "0000:01:00.0"
    other = _made(machine.function("pci0000:00/0000:00:02.0/0000:02:00.0", kind="0x010802") / "nvme/nvme1")
    (subsystem / "nvme1").symlink_to(other)
    assert "several controllers lead to (0000:01:00.0, 0000:02:00.0)" in refusal(machine, "/mnt/a")


def test_nvme_over_fabrics(machine: Machine) -> None:
    """An NVMe namespace over a network has no PCI function and is refused. The error names its transport."""
    controller = _made(machine.sysfs / "devices/virtual/nvme-fabrics/ctl/nvme5")
    (controller / "transport").write_text("tcp\n")
    machine.block("259:0", _made(controller / "nvme5n1"))
    machine.mount("/mnt/a", "259:0")
    assert "an NVMe namespace over tcp without a PCI function" in refusal(machine, "/mnt/a")


def test_mountinfo_that_tells_nothing(machine: Machine) -> None:
    """Without a readable mountinfo every folder is refused and no SSD is found."""
    system = machine.system()
    system.mountinfo.unlink()
    with pytest.raises(ConfigError, match="is on no mount"):
        ssd_of(system, Path("/mnt/a"))
    assert all_ssds(system) == []


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
