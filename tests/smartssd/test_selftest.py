"""``smart-infinity selftest`` without a card, or with a card that exists in sysfs only."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from unittest import mock

import pytest

from hls.description import SMARTSSD
from hls.xclbin import xclbin
from lightning_smartinfinity import DeviceError, SmartSSDConfig, StorageError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.devices.smartssd import examination, opening
from lightning_smartinfinity.devices.smartssd.discovery.cards import emulated_card
from lightning_smartinfinity.devices.smartssd.discovery.runtime import Runtime
from lightning_smartinfinity.devices.smartssd.examination import examine
from lightning_smartinfinity.devices.smartssd.scratch import scratch_folder
from lightning_smartinfinity.settings.smartssd import XCLBIN_VARIABLE
from tests.smartssd.fake_machine import GIB, SHELL, XOCL, Machine, smartssd

# The package has a function of that name.
self_test_module = importlib.import_module("lightning_smartinfinity.devices.smartssd.self_test")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with XRT and no hardware."""
    (tmp_path / "xrt").mkdir()
    (tmp_path / "xrt/version.json").write_text('{"BUILD_VERSION": "2.13.466"}')
    (tmp_path / "kernels.xclbin").write_bytes(xclbin(SMARTSSD))
    there = Runtime(tmp_path / "xrt", "2.13.466", "libxrt.so", False)
    monkeypatch.setattr(examination, "runtime_of", lambda system: there)
    return Machine(tmp_path)


def findings(machine: Machine, *folders: str) -> dict[tuple[str, str], examination.Finding]:
    settings = SmartSSDConfig(xclbin=machine.root / "kernels.xclbin")
    found = examine(folders, settings, machine.system())
    return {(one.subject, one.name): one for one in found}


def test_what_sysfs_tells_of_cards(machine: Machine) -> None:
    """The driver, and each card's shell, device node and P2P window are told. Without folders no card is run."""
    smartssd(machine, 0)
    machine.card("pci0000:00/0000:00:01.0/0000:01:00.1", minor=140, p2p=f"bar:{1 << 25}\nexp_bar:{4 * GIB}\n")
    machine.locked.add(machine.root / "dev/dri/renderD140")
    found = findings(machine)
    good, bad = "card 0000:42:00.1", "card 0000:01:00.1"
    told = {
        (good, "P2P"): (True, "enabled, 4 GiB of 4 GiB"),
        (bad, "P2P"): (False, "disabled, 32 MiB of 4 GiB"),
        (good, "shell"): (None, SHELL),
        ("XRT", "version"): (None, "2.13.466"),
        ("cards", "xocl version"): (None, XOCL),
    }
    assert {key: (found[key].ok, found[key].value) for key in told} == told
    assert "xbutil configure --device 0000:01:00.1 --p2p enable" in found[bad, "P2P"].remedy
    states = [found[key].ok for key in ((good, "device node"), ("xclbin", "file"), ("folders", "named"))]
    assert states == [True, True, None]
    assert found[bad, "device node"].ok is False and "render" in found[bad, "device node"].value


def test_pairs_that_cannot_be_worked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is paired by sysfs. Only opening the card shows that XRT does not know it: one finding, and no work.

    ``~`` in a folder's path is the user's home, as in storage=....
    """
    monkeypatch.setenv("HOME", str(machine.root))
    smartssd(machine, 0, mounted=str(machine.root))
    found = findings(machine, "~/storage")
    assert found[str(machine.root / "storage"), "card"].value == "card 0000:42:00.1"
    opened = found["card 0000:42:00.1", "opened"]
    assert "libxrt.so" in opened.value and "shares a PCIe switch" not in opened.value
    assert "selftest" not in opened.remedy and [one for one in found.values() if one.ok is False] == [opened]
    assert findings(machine, "/")["folders", "pairing"].ok is False


def test_no_card(machine: Machine) -> None:
    """The finding advises to load XRT's driver only if it is not loaded; a card without it is there, but unusable."""
    found = findings(machine)["cards", "found"]
    assert found.value == "none: XRT's driver xocl is not loaded" and "modprobe xocl" in found.remedy
    (machine.sysfs / "bus/pci/drivers/xocl").mkdir(parents=True)
    found = findings(machine)["cards", "found"]
    assert found.value == "none: XRT's driver xocl holds no card" and "modprobe" not in found.remedy
    machine.card("pci0000:00/0000:00:01.0/0000:01:00.1", driver=False)
    all_found = findings(machine)
    assert "0000:01:00.1" in all_found["cards", "driver"].value and ("cards", "found") not in all_found


@pytest.mark.parametrize("why", ["no XRT", "a closed node"])
def test_no_card_is_opened_in_vain(machine: Machine, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """What keeps a card from being opened is the only finding that fails: opening it would tell the same."""
    smartssd(machine, 0, mounted=str(machine.root))
    if why == "no XRT":
        gone = Runtime(machine.root / "gone", None, "lib.so", False)
        monkeypatch.setattr(examination, "runtime_of", lambda system: gone)
    else:
        machine.locked.add(machine.root / "dev/dri/renderD128")
    failed = [key for key, one in findings(machine, str(machine.root)).items() if one.ok is False]
    assert failed == [("XRT", "XILINX_XRT") if why == "no XRT" else ("card 0000:42:00.1", "device node")]


@pytest.mark.parametrize(
    "remedy",
    sorted({*opening._REMEDIES.values(), opening._OTHER_REMEDY, self_test_module._DAMAGED, self_test_module._NO_P2P}),
)
def test_the_command_does_not_advise_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch, remedy: str) -> None:
    """Advice to run this command is left out of its findings; the rest of the remedy stays."""
    monkeypatch.setattr(examination, "open_card", mock.Mock(side_effect=DeviceError("The card fails.", remedy)))
    smartssd(machine, 0, mounted=str(machine.root))
    shown = findings(machine, str(machine.root))["card 0000:42:00.1", "opened"].remedy
    assert shown and remedy.startswith(shown) and "selftest" not in shown


def test_a_machine_with_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each missing part is reported with a remedy, and the exit status is 1."""
    for name in ("XILINX_XRT", "XCL_EMULATION_MODE", XCLBIN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert main(["selftest", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert all(told in shown for told in ("FAIL  XILINX_XRT", "setup.sh", "make -C hls xclbin", "FAIL  pairing"))
    assert main(["selftest", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    failed = {(one["subject"], one["name"]): one["remedy"] for one in content["findings"] if one["ok"] is False}
    assert not content["ok"] and {("XRT", "XILINX_XRT"), ("xclbin", "file"), ("cards", "found")} <= failed.keys()
    assert all(failed.values())


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--devices", "²"], "number from 0 to 65535"),
        (["--devices", "\u0661"], "number from 0 to 65535"),
        (["--devices", "9" * 30], "number from 0 to 65535"),
        (["--devices", "0", "9" * 5000], "number from 0 to 65535"),
        (["--devices", "65536"], "PCI address such as 0000:3d:00.1"),
        (["--devices", ""], "PCI address such as 0000:3d:00.1"),
        (["--mib", "0"], "int from 1 to 4096"),
        (["--mib", "-5"], "int from 1 to 4096"),
        (["--mib", "99999999999"], "int from 1 to 4096"),
        (["--mib", "9" * 5000], "int from 1 to 4096"),
        (["--mib", "\u0661"], "int from 1 to 4096"),
    ],
)
def test_options_out_of_range(capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str) -> None:
    """An option out of range ends the command with a short message that says what is allowed."""
    with pytest.raises(SystemExit) as ended:
        main(["selftest", *arguments])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and wanted in shown and len(shown) < 1000


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["a", "a"], "twice"),
        (["a", "b/../a"], "/a' twice"),
        (["nul\0"], "cannot be a folder"),
        (["~nosuch/a"], "cannot be a folder"),
        ([""], "names no folder"),
    ],
)
def test_folders_that_training_refuses(machine: Machine, folders: list[str], words: str) -> None:
    """Folders that training refuses are refused here, and no card is paired. The other checks still run."""
    found = findings(machine, *folders)
    assert found["folders", "named"].ok is False and words in found["folders", "named"].value
    assert ("folders", "pairing") not in found and found["xclbin", "file"].ok


def test_what_nobody_foresaw(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception becomes a failed finding, and the other checks still run."""
    breaks = mock.Mock(side_effect=LookupError("a file of sysfs says so"))
    monkeypatch.setattr(examination, "read_xclbin", breaks)
    monkeypatch.setattr(examination, "cards_of", breaks)
    found = findings(machine)
    for broken in (found["xclbin", "file"], found["cards", "found"]):
        assert (broken.ok, broken.value) == (False, "LookupError: a file of sysfs says so")
        assert "report" in broken.remedy
    assert found["folders", "named"].ok is None


def test_storage_that_fails_a_self_test(tmp_path: Path) -> None:
    """An error names the card and the storage folder instead of our temporary folder, which is removed.

    A file in place of the storage folder is named as well.
    """
    card, folder = emulated_card(3), tmp_path / "not/yet"
    with (
        pytest.raises(StorageError, match=r"emulated card 3: reading a file in '.*/not/yet' failed") as failed,
        scratch_folder(card, folder) as scratch,
    ):
        scratch.read("gone")
    assert ".smart-infinity-" not in str(failed.value)
    (tmp_path / "not").touch()
    with pytest.raises(StorageError, match=r"'.*/not/yet' failed.*A file stands where"), scratch_folder(card, folder):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["not"]
