"""The pairing of cards with storage folders, on machines of several topologies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from lightning_smartinfinity import ConfigError, DeviceError, SmartSSDConfig
from lightning_smartinfinity.devices.smartssd.discovery.card_setup import paired_cards
from lightning_smartinfinity.devices.smartssd.discovery.ssds import ssd_of
from tests.helpers.assertions import refused
from tests.smartssd.fake_machine import Machine, smartssd

SWITCH = CONTROLLER = "pci0000:00/0000:00:01.0/0000:01:00.0"
OTHER = "pci0000:00/0000:00:02.0/0000:02:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def addresses(machine: Machine, *folders: str, devices: Sequence[int | str] | None = None) -> list[str]:
    cards = paired_cards([Path(folder) for folder in folders], SmartSSDConfig(devices=devices), machine.system())
    return [card.address for card in cards]


def smartssds(machine: Machine, *, number: int) -> None:
    """Add SmartSSDs below one PCIe switch, and an ordinary SSD elsewhere."""
    for each in range(number):
        smartssd(machine, each, mounted=f"/mnt/nvme{each}")
    machine.ssd("pci0000:3a/0000:3a:00.0/0000:39:00.0", "nvme9", device="259:9")
    machine.mount("/mnt/plain", "259:9")


def below_switch(machine: Machine, *, cards: int = 1, ssds: int = 1) -> None:
    """Add cards and SSDs to one switch, and mount the first SSD."""
    for number in range(2, 2 + cards):
        machine.card(f"{SWITCH}/0000:0{number}:00.1", minor=128 + number)
    for number in range(5, 5 + ssds):
        machine.ssd(f"{SWITCH}/0000:0{number}:00.0", f"nvme{number}", device=f"259:{number}")
    machine.mount("/mnt/a", "259:5")


def one_of_each(machine: Machine, *, card: str, ssd: str) -> None:
    machine.card(card)
    machine.ssd(ssd, device="259:0")
    machine.mount("/mnt/a", "259:0")


TWO_ROOT_PORTS = partial(one_of_each, card="pci0000:00/0000:00:01.0/0000:01:00.1", ssd=OTHER)
# Intel's VMD adds a root complex whose domain has five digits.
VMD = "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"


def emulation(machine: Machine) -> None:
    """Let XRT's emulation skip the PCI bus: cards have numbers, in the folders' order unless the user names them."""
    machine.environment["XCL_EMULATION_MODE"] = "hw_emu"


ONE, TWO = "/mnt/nvme0", "/mnt/nvme1"


@pytest.mark.parametrize(
    ("build", "folders", "devices", "expected"),
    [
        # Each folder gets the card of its own SSD in any order. Folders need not exist yet.
        (
            partial(smartssds, number=4),
            ("/mnt/nvme2/jobs/a", ONE, "/mnt/nvme3"),
            None,
            ["0000:62:00.1", "0000:42:00.1", "0000:72:00.1"],
        ),
        (partial(smartssds, number=1), (ONE,), None, ["0000:42:00.1"]),
        (
            partial(one_of_each, card=f"{VMD}/10000:e2:00.1", ssd=f"{VMD}/10000:e3:00.0"),
            ("/mnt/a",),
            None,
            ["10000:e2:00.1"],
        ),
        (partial(below_switch, cards=2), ("/mnt/a",), ["03:00.1"], ["0000:03:00.1"]),
        # Cards are named by address, with or without domain, or by number.
        (partial(smartssds, number=2), (ONE, TWO), ["0000:42:00.1", "0000:52:00.1"], ["0000:42:00.1", "0000:52:00.1"]),
        (partial(smartssds, number=2), (ONE, TWO), ["42:00.1", "52:00.1"], ["0000:42:00.1", "0000:52:00.1"]),
        (partial(smartssds, number=2), (ONE, TWO), [0, 1], ["0000:42:00.1", "0000:52:00.1"]),
        (emulation, ("/a", "/b"), None, ["0", "1"]),
        (emulation, ("/a", "/b"), [1, "0"], ["1", "0"]),
    ],
)
def test_pairs(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    build: Callable[[Machine], None],
    folders: tuple[str, ...],
    devices: list[int | str] | None,
    expected: list[str],
) -> None:
    """Each folder gets the card that is nearest to its SSD, or the one that the user names, without a warning."""
    build(machine)
    assert addresses(machine, *folders, devices=devices) == expected and not caplog.records


@pytest.mark.parametrize(
    ("build", "folders", "devices", "told"),
    [
        # A plain SSD behind the same switch gets no card: each card has a nearer SSD. The error shows the tree.
        (
            partial(smartssds, number=2),
            ("/mnt/plain",),
            None,
            r"equally near.* 0000:42:00\.1, 0000:52:00\.1"
            r".*\n *0000:39:00\.0  SSD nvme9n1 \(/mnt/plain\).*\n *0000:42:00\.1  FPGA 0 \(xilinx_u2",
        ),
        (partial(smartssds, number=1), ("/mnt/plain",), None, r"belongs to 0000:43:00\.0"),
        # A common root complex does not count as a common switch.
        (TWO_ROOT_PORTS, ("/mnt/a",), None, "No card shares a PCIe switch"),
        (partial(below_switch, cards=2), ("/mnt/a",), None, "equally near"),
        (partial(below_switch, ssds=2), ("/mnt/a",), None, "belongs to"),
        (partial(smartssds, number=1), (f"{ONE}/a", f"{ONE}/b"), None, r"share one SSD \(0000:43:00\.0\)"),
        (partial(smartssds, number=1), (f"{ONE}/a", f"{ONE}/b"), [0, 0], r"share one card \(0000:42:00\.1\)"),
        (partial(smartssds, number=2), (ONE, TWO), [0, 7], r"0: 0000:42:00\.1"),
        (partial(smartssds, number=2), (ONE, TWO), [0], "1 cards for 2"),
        (emulation, ("/a",), ["0000:42:00.1"], "numbers alone"),
        (emulation, ("/a",), ["²"], "numbers alone"),
        (emulation, ("/a",), ["9" * 5000], "numbers alone"),
        (emulation, ("/a", "/b"), [1, 1], "share one card"),
    ],
)
def test_folders_without_a_card_of_their_own(
    machine: Machine,
    build: Callable[[Machine], None],
    folders: tuple[str, ...],
    devices: list[int | str] | None,
    told: str,
) -> None:
    """The error says why no card belongs to a folder, and what to do."""
    build(machine)
    with refused(ConfigError, match=f"(?s){told}"):
        addresses(machine, *folders, devices=devices)


def test_a_pair_that_the_tree_contradicts(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """It is taken, with a warning."""
    smartssds(machine, number=2)
    with caplog.at_level(logging.WARNING):
        assert addresses(machine, ONE, TWO, devices=[1, 0]) == ["0000:52:00.1", "0000:42:00.1"]
    assert len(caplog.records) == 2


def test_no_card(machine: Machine) -> None:
    """A machine without a card and a card without its driver are refused with different errors."""
    machine.ssd("pci0000:00/0000:00:01.0/0000:01:00.0", device="259:0")
    machine.mount("/mnt/a", "259:0")
    with pytest.raises(DeviceError, match="no SmartSSD on this machine"):
        addresses(machine, "/mnt/a")
    machine.card("pci0000:00/0000:00:02.0/0000:02:00.1", driver=False)
    with pytest.raises(DeviceError, match=r"xocl does not hold the card 0000:02:00\.1.*modprobe xocl"):
        addresses(machine, "/mnt/a")


# ---- the SSD below a storage folder, and the layers in between that are refused


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


def of_kind(machine: Machine, kind: str) -> None:
    machine.mount("/mnt/a", "0:41", kind=kind, source="something")


def mapped(machine: Machine, uuid: str) -> None:
    folder = machine.virtual("dm-3", "253:3")
    if uuid:
        _made(folder / "dm").joinpath("uuid").write_text(f"{uuid}\n")
    machine.mount("/mnt/a", "253:3", source="/dev/mapper/vg-state")


def virtual(machine: Machine, name: str, kind: str, partition: str = "") -> None:
    """Add a virtual disk of a kind, and mount it, or a partition of it."""
    whole = machine.virtual(name, "9:0")
    _made(whole / kind)
    if partition:
        _made(whole / partition).joinpath("partition").write_text("1\n")
        machine.block("259:9", whole / partition)
    machine.mount("/mnt/a", "259:9" if partition else "9:0", source=f"/dev/{name}")


def sata(machine: Machine) -> None:
    machine.block("8:0", _made(machine.sysfs / "devices/pci0000:00/0000:00:17.0/ata1/host0/block/sda"))
    machine.mount("/mnt/a", "8:0", source="/dev/sda")


def over_fabrics(machine: Machine) -> None:
    controller = _made(machine.sysfs / "devices/virtual/nvme-fabrics/ctl/nvme5")
    (controller / "transport").write_text("tcp\n")
    machine.block("259:0", _made(controller / "nvme5n1"))
    machine.mount("/mnt/a", "259:0")


@pytest.mark.parametrize(
    ("layer", "settings", "words"),
    [
        (of_kind, ["btrfs"], "is on btrfs"),
        (of_kind, ["zfs"], "is on zfs"),
        (of_kind, ["tmpfs"], "in memory"),
        (of_kind, ["overlay"], "container"),
        (of_kind, ["nfs4"], "nfs4, a network"),
        (of_kind, ["fuse.sshfs"], "fuse.sshfs, a network or user-space"),
        (mapped, ["LVM-abc"], "/dev/mapper/vg-state.*LVM (dm-3)"),
        (mapped, ["CRYPT-LUKS2-abc-cr"], "/dev/mapper/vg-state.*dm-crypt (dm-3)"),
        (mapped, ["mpath-abc"], "/dev/mapper/vg-state.*multipath"),
        (mapped, ["part1-mpath-abc"], "a device-mapper target (dm-3)"),
        (mapped, [""], "a device-mapper target (dm-3)"),
        (virtual, ["md127", "md"], "software RAID, md (md127)"),
        (virtual, ["md0", "md", "md0p1"], "software RAID, md (md0)"),  # a partition is judged by its whole disk
        (virtual, ["loop0", "loop"], "a loop device (loop0)"),
        (sata, [], "no NVMe SSD (sda)"),
        (lambda machine: machine.mount("/mnt/a", "259:77"), [], "259:77 is not in sysfs"),
        (over_fabrics, [], "an NVMe namespace over tcp without a PCI function"),
    ],
)
def test_other_layers_are_refused_by_name(
    machine: Machine, layer: Callable[..., object], settings: list[str], words: str
) -> None:
    """What moves blocks around, or keeps them in memory or elsewhere, is refused by name."""
    layer(machine, *settings)
    with refused(ConfigError, "/mnt/a", *words.split(".*"), remedy="update_device='host'"):
        ssd_of(machine.system(), Path("/mnt/a"))


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
