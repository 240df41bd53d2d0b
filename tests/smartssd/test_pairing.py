"""The pairing of cards with storage folders, on machines of several topologies."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lightning_smartinfinity import ConfigError, DeviceError, SmartSSDConfig
from lightning_smartinfinity.devices.smartssd.discovery.card_setup import paired_cards
from tests.smartssd.fake_machine import Machine, smartssd

SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def addresses(machine: Machine, *folders: str, devices: Sequence[int | str] | None = None) -> list[str]:
    cards = paired_cards([Path(folder) for folder in folders], SmartSSDConfig(devices=devices), machine.system())
    return [card.address for card in cards]


def smartssds(number: int) -> Callable[[Machine], None]:
    """Return a function that adds SmartSSDs below one PCIe switch, and an ordinary SSD elsewhere."""

    def build(machine: Machine) -> None:
        for each in range(number):
            smartssd(machine, each, mounted=f"/mnt/nvme{each}")
        machine.ssd("pci0000:3a/0000:3a:00.0/0000:39:00.0", "nvme9", device="259:9")
        machine.mount("/mnt/plain", "259:9")

    return build


def below_switch(*, cards: int = 1, ssds: int = 1) -> Callable[[Machine], None]:
    """Return a function that adds cards and SSDs to one switch, and mounts the first SSD."""

    def build(machine: Machine) -> None:
        for number in range(2, 2 + cards):
            machine.card(f"{SWITCH}/0000:0{number}:00.1", minor=128 + number)
        for number in range(5, 5 + ssds):
            machine.ssd(f"{SWITCH}/0000:0{number}:00.0", f"nvme{number}", device=f"259:{number}")
        machine.mount("/mnt/a", "259:5")

    return build


def two_root_ports(machine: Machine) -> None:
    machine.card("pci0000:00/0000:00:01.0/0000:01:00.1")
    machine.ssd("pci0000:00/0000:00:02.0/0000:02:00.0", device="259:0")
    machine.mount("/mnt/a", "259:0")


def vmd(machine: Machine) -> None:
    """Add Intel's VMD, which adds a root complex whose domain has five digits."""
    switch = "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"
    machine.card(f"{switch}/10000:e2:00.1")
    machine.ssd(f"{switch}/10000:e3:00.0", device="259:0")
    machine.mount("/mnt/a", "259:0")


def emulation(machine: Machine) -> None:
    """Let XRT's emulation skip the PCI bus: cards have numbers, in the folders' order unless the user names them."""
    machine.environment["XCL_EMULATION_MODE"] = "hw_emu"


ONE, TWO = "/mnt/nvme0", "/mnt/nvme1"


@pytest.mark.parametrize(
    ("build", "folders", "devices", "expected"),
    [
        # Each folder gets the card of its own SSD in any order. Folders need not exist yet.
        (
            smartssds(4),
            ("/mnt/nvme2/jobs/a", ONE, "/mnt/nvme3"),
            None,
            ["0000:62:00.1", "0000:42:00.1", "0000:72:00.1"],
        ),
        (smartssds(1), (ONE,), None, ["0000:42:00.1"]),
        (vmd, ("/mnt/a",), None, ["10000:e2:00.1"]),
        (below_switch(cards=2), ("/mnt/a",), ["03:00.1"], ["0000:03:00.1"]),
        # Cards are named by address, with or without domain, or by number.
        (smartssds(2), (ONE, TWO), ["0000:42:00.1", "0000:52:00.1"], ["0000:42:00.1", "0000:52:00.1"]),
        (smartssds(2), (ONE, TWO), ["42:00.1", "52:00.1"], ["0000:42:00.1", "0000:52:00.1"]),
        (smartssds(2), (ONE, TWO), [0, 1], ["0000:42:00.1", "0000:52:00.1"]),
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
    assert addresses(machine, *folders, devices=devices) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("build", "folders", "devices", "told"),
    [
        # A plain SSD behind the same switch gets no card: each card has a nearer SSD. The error shows the tree.
        (
            smartssds(2),
            ("/mnt/plain",),
            None,
            r"equally near.* 0000:42:00\.1, 0000:52:00\.1"
            r".*\n *0000:39:00\.0  SSD nvme9n1 \(/mnt/plain\).*\n *0000:42:00\.1  FPGA 0 \(xilinx_u2",
        ),
        (smartssds(1), ("/mnt/plain",), None, r"belongs to 0000:43:00\.0"),
        # A common root complex does not count as a common switch.
        (two_root_ports, ("/mnt/a",), None, "No card shares a PCIe switch"),
        (below_switch(cards=2), ("/mnt/a",), None, "equally near"),
        (below_switch(ssds=2), ("/mnt/a",), None, "belongs to"),
        (smartssds(1), (f"{ONE}/a", f"{ONE}/b"), None, r"share one SSD \(0000:43:00\.0\)"),
        (smartssds(1), (f"{ONE}/a", f"{ONE}/b"), [0, 0], r"share one card \(0000:42:00\.1\)"),
        (smartssds(2), (ONE, TWO), [0, 7], r"0: 0000:42:00\.1"),
        (smartssds(2), (ONE, TWO), [0], "1 cards for 2"),
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
    with pytest.raises(ConfigError) as caught:
        addresses(machine, *folders, devices=devices)
    assert re.search(told, str(caught.value), re.DOTALL) and caught.value.remedy


def test_a_pair_that_the_tree_contradicts(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """It is taken, with a warning."""
    smartssds(2)(machine)
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
