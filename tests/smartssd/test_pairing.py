"""The pairing of cards with storage folders, on machines of several topologies."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lightning_smartinfinity import ConfigError, DeviceError, SmartSSDConfig
from lightning_smartinfinity.devices.smartssd.discovery.card_setup import paired_cards
from tests.smartssd.fake_machine import Machine, smartssd

ANY = SmartSSDConfig()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def addresses(machine: Machine, *folders: str, settings: SmartSSDConfig = ANY) -> list[str]:
    cards = paired_cards([Path(folder) for folder in folders], settings, machine.system())
    return [card.address for card in cards]


def refused(machine: Machine, *folders: str, settings: SmartSSDConfig = ANY) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        addresses(machine, *folders, settings=settings)
    assert caught.value.remedy
    return caught.value


def test_four_smartssds_behind_one_switch(machine: Machine) -> None:
    """Each folder gets the card of its own SSD in any order. Folders need not exist yet."""
    for number in range(4):
        smartssd(machine, number, mounted=f"/mnt/nvme{number}")
    found = addresses(machine, "/mnt/nvme2/jobs/a", "/mnt/nvme0", "/mnt/nvme3")
    assert found == ["0000:62:00.1", "0000:42:00.1", "0000:72:00.1"]


def test_a_plain_ssd_beside_them(machine: Machine) -> None:
    """A plain SSD behind the same switch gets no card: each card has a nearer SSD. The error shows the tree."""
    for number in range(2):
        smartssd(machine, number, mounted=f"/mnt/nvme{number}")
    machine.ssd("pci0000:3a/0000:3a:00.0/0000:39:00.0", "nvme9", device="259:9")
    machine.mount("/mnt/plain", "259:9")
    error = refused(machine, "/mnt/plain")
    assert "0000:42:00.1, 0000:52:00.1" in error.problem and "equally near" in error.problem
    tree = error.problem.splitlines()
    assert any(line.strip().startswith("0000:39:00.0  SSD nvme9n1 (/mnt/plain)") for line in tree)
    assert any(line.strip().startswith("0000:42:00.1  FPGA 0 (xilinx_u2") for line in tree)


def test_a_card_that_belongs_to_another_ssd(machine: Machine) -> None:
    """A plain SSD does not get the only card of the switch, because that card is nearer to its own SSD."""
    smartssd(machine, 0, mounted="/mnt/nvme0")
    machine.ssd("pci0000:3a/0000:3a:00.0/0000:39:00.0", "nvme9", device="259:9")
    machine.mount("/mnt/plain", "259:9")
    assert "belongs to 0000:43:00.0" in refused(machine, "/mnt/plain").problem
    assert addresses(machine, "/mnt/nvme0") == ["0000:42:00.1"]


def test_an_ssd_on_another_root_port(machine: Machine) -> None:
    """A common root complex does not count as a common switch."""
    machine.card("pci0000:00/0000:00:01.0/0000:01:00.1")
    machine.ssd("pci0000:00/0000:00:02.0/0000:02:00.0", device="259:0")
    machine.mount("/mnt/a", "259:0")
    assert "No card shares a PCIe switch" in refused(machine, "/mnt/a").problem


def test_two_cards_beside_one_ssd(machine: Machine) -> None:
    """Two cards equally near to one SSD are refused unless the user names one."""
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    for number in (2, 3):
        machine.card(f"{switch}/0000:0{number}:00.1", minor=128 + number)
    machine.ssd(f"{switch}/0000:04:00.0", device="259:0")
    machine.mount("/mnt/a", "259:0")
    assert "equally near" in refused(machine, "/mnt/a").problem
    assert addresses(machine, "/mnt/a", settings=SmartSSDConfig(devices=["03:00.1"])) == ["0000:03:00.1"]


def test_two_ssds_beside_one_card(machine: Machine) -> None:
    """Two SSDs equally near to one card are refused, even if one of them holds no folder."""
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    machine.card(f"{switch}/0000:02:00.1")
    for number in (3, 4):
        machine.ssd(f"{switch}/0000:0{number}:00.0", f"nvme{number}", device=f"259:{number}")
    machine.mount("/mnt/a", "259:3")
    assert "belongs to" in refused(machine, "/mnt/a").problem


def test_two_folders_on_one_ssd(machine: Machine) -> None:
    """Two folders on one SSD cannot have a card each."""
    smartssd(machine, 0, mounted="/mnt/nvme0")
    error = refused(machine, "/mnt/nvme0/a", "/mnt/nvme0/b")
    assert "share one SSD (0000:43:00.0)" in error.problem
    named = SmartSSDConfig(devices=[0, 0])
    assert "share one card (0000:42:00.1)" in refused(machine, "/mnt/nvme0/a", "/mnt/nvme0/b", settings=named).problem


def test_domains_of_vmd_and_long_addresses(machine: Machine) -> None:
    """Pairing works below Intel's VMD, which adds a root complex whose domain has five digits."""
    switch = "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"
    machine.card(f"{switch}/10000:e2:00.1")
    machine.ssd(f"{switch}/10000:e3:00.0", device="259:0")
    machine.mount("/mnt/a", "259:0")
    assert addresses(machine, "/mnt/a") == ["10000:e2:00.1"]


def test_named_cards(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Cards are named by address, with or without domain, or by number. A pair that the tree contradicts warns."""
    for number in range(2):
        smartssd(machine, number, mounted=f"/mnt/nvme{number}")
    folders = ("/mnt/nvme0", "/mnt/nvme1")
    for names in (["0000:42:00.1", "0000:52:00.1"], ["42:00.1", "52:00.1"], [0, 1]):
        assert addresses(machine, *folders, settings=SmartSSDConfig(devices=names)) == ["0000:42:00.1", "0000:52:00.1"]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        crossed = addresses(machine, *folders, settings=SmartSSDConfig(devices=[1, 0]))
    assert crossed == ["0000:52:00.1", "0000:42:00.1"] and len(caplog.records) == 2
    assert "0: 0000:42:00.1" in refused(machine, *folders, settings=SmartSSDConfig(devices=[0, 7])).remedy
    assert "1 cards for 2" in refused(machine, *folders, settings=SmartSSDConfig(devices=[0])).problem


def test_no_card(machine: Machine) -> None:
    """A machine without a card and a card without its driver are refused with different errors."""
    machine.ssd("pci0000:00/0000:00:01.0/0000:01:00.0", device="259:0")
    machine.mount("/mnt/a", "259:0")
    with pytest.raises(DeviceError, match="no SmartSSD on this machine"):
        addresses(machine, "/mnt/a")
    machine.card("pci0000:00/0000:00:02.0/0000:02:00.1", driver=False)
    with pytest.raises(DeviceError, match=r"xocl does not hold the card 0000:02:00\.1.*modprobe xocl"):
        addresses(machine, "/mnt/a")


def test_emulated_cards_stand_beside_any_folder(machine: Machine) -> None:
    """XRT's emulation skips the PCI bus: cards have numbers, in the folders' order unless the user names them."""
    machine.environment["XCL_EMULATION_MODE"] = "hw_emu"
    assert addresses(machine, "/a", "/b") == ["0", "1"]
    assert addresses(machine, "/a", "/b", settings=SmartSSDConfig(devices=[1, "0"])) == ["1", "0"]
    assert "numbers alone" in refused(machine, "/a", settings=SmartSSDConfig(devices=["0000:42:00.1"])).problem
    assert "share one card" in refused(machine, "/a", "/b", settings=SmartSSDConfig(devices=[1, 1])).problem
