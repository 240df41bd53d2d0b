"""The package reads cards' P2P, shell and device node from sysfs, the xclbin's header, and XRT's installation.

``smart-infinity selftest`` tells what it finds.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import struct
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hls.description import KERNELS, SMARTSSD
from hls.xclbin import xclbin
from lightning_smartinfinity import (
    ConfigError,
    DeviceError,
    SmartInfinityError,
    SmartInfinityStrategy,
    SmartSSDConfig,
    StorageError,
    UnsupportedError,
    native,
)
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.devices.smartssd import examination, find_cards, gradient_files, opening
from lightning_smartinfinity.devices.smartssd import kernels as of_package
from lightning_smartinfinity.devices.smartssd.discovery import card_setup
from lightning_smartinfinity.devices.smartssd.discovery.cards import cards_of, emulated_card, unusable_node
from lightning_smartinfinity.devices.smartssd.discovery.p2p import P2P, P2PState, p2p_of
from lightning_smartinfinity.devices.smartssd.discovery.runtime import (
    Runtime,
    choose_binding,
    require_runtime,
    runtime_of,
)
from lightning_smartinfinity.devices.smartssd.discovery.xclbin import Xclbin, read_xclbin
from lightning_smartinfinity.devices.smartssd.examination import examine
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.devices.smartssd.scratch import scratch_folder
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.settings.smartssd import XCLBIN_VARIABLE
from tests.cli.conftest import Cli, cli
from tests.helpers.golden import RULES as RULE_OF
from tests.smartssd.fake_machine import GIB, SHELL, XOCL, Machine, smartssd
from tests.storage.makers import refuse_to_open

__all__ = ["cli"]

WHOLE, SMALL = 4 * GIB, 32 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("config", "state", "remedy"),
    [
        (f"bar:{WHOLE}\nexp_bar:{WHOLE}", P2PState.ENABLED, ""),
        (f"bar:{WHOLE}\nexp_bar:{WHOLE}\nremap:{WHOLE}", P2PState.ENABLED, ""),
        (f"bar:{SMALL}\nexp_bar:{WHOLE}", P2PState.DISABLED, "--p2p enable"),
        (f"bar:{SMALL}\nexp_bar:{WHOLE}\nrbar:{WHOLE}", P2PState.WARM_REBOOT, "Reboot the machine warm"),
        (f"bar:{WHOLE}\nexp_bar:{WHOLE}\nremap:{SMALL}", P2PState.BROKEN, "--p2p disable"),
        (f"exp_bar:{WHOLE}", P2PState.NOT_SUPPORTED, "shell"),
        ("what a later driver says", P2PState.NOT_SUPPORTED, "shell"),
        (None, P2PState.UNKNOWN, "xbutil examine"),
    ],
)
def test_p2p_as_xrt_reads_it(machine: Machine, config: str | None, state: P2PState, remedy: str) -> None:
    """P2P is enabled if bar equals exp_bar, and needs a warm reboot if rbar exceeds bar. Each state has its remedy."""
    found = p2p_of(machine.card("pci0000:00/0000:00:01.0/0000:01:00.1", p2p=config))
    assert found.state is state and remedy in found.remedy("0000:01:00.1")


def test_cards_are_numbered_by_address(machine: Machine) -> None:
    """Cards are sorted by PCI address and have shell, node and P2P window. Other entries of the driver are ignored.

    A device node is unusable if the user lacks the rights or if it is missing, as in a container.
    """
    machine.card("pci0000:80/0000:80:01.0/0000:81:00.1", minor=128)
    machine.card("pci0000:00/0000:00:01.0/0000:01:00.1", minor=129, p2p=None, shell="other")
    system = machine.system()
    first, second = cards_of(system)
    assert (first.number, first.address, first.shell, first.p2p.state) == (0, "0000:01:00.1", "other", P2PState.UNKNOWN)
    assert (second.number, second.address, second.shell) == (1, "0000:81:00.1", SHELL)
    assert second.p2p == P2P(P2PState.ENABLED, WHOLE, WHOLE)
    assert second.node == machine.root / "dev/dri/renderD128" and unusable_node(system, second) is None
    machine.locked.add(second.node)
    assert "usermod -aG render" in str(unusable_node(system, second))
    second.node.unlink()
    assert "--device" in str(unusable_node(system, second))


def test_header_of_an_xclbin(tmp_path: Path, machine: Machine) -> None:
    """The xclbin comes from the settings or else the environment. Its header gives uuid, platform and memory."""
    path = tmp_path / "kernels.xclbin"
    path.write_bytes(xclbin(SMARTSSD) + b"signature")
    for settings in (SmartSSDConfig(xclbin=path), SmartSSDConfig(xclbin=str(path)), None):
        machine.environment[XCLBIN_VARIABLE] = str(path) if settings is None else "/not/there"
        found = read_xclbin(settings, machine.system())
        platform, kernels = SMARTSSD.platform, tuple(kernel.name for kernel in SMARTSSD.kernels)
        expected = Xclbin(path, found.uuid, platform.vbnv, platform.bank.size_bytes, kernels)
        assert found == expected and uuid.UUID(found.uuid).bytes in path.read_bytes()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, ConfigError) for name in ("gone", ".", "pipe", "~nosuch/x", "\ud800")),
        ("torn", DeviceError),
        ("other", DeviceError),
    ],
)
def test_xclbins_that_are_none(tmp_path: Path, machine: Machine, name: str, kind: type[SmartInfinityError]) -> None:
    """An unusable xclbin is refused.

    It may be missing, a folder, a pipe, truncated, another kind of file, or in the home of an unknown user. The error
    says which setting named it and how to build one.
    """
    (tmp_path / "other").write_bytes(b"\x7fELF" * 200)
    (tmp_path / "torn").write_bytes(xclbin(SMARTSSD)[:470])
    os.mkfifo(tmp_path / "pipe")
    path = name if "/" in name or name == "\ud800" else str(tmp_path / name)
    machine.environment[XCLBIN_VARIABLE] = path
    for settings, setting in (
        (SmartSSDConfig(xclbin=path), f"SmartSSDConfig(xclbin={path!r})"),
        (None, f"{XCLBIN_VARIABLE}={path!r}"),
    ):
        with pytest.raises(kind, match=re.escape(setting) if path.isascii() else "xclbin") as refused:
            read_xclbin(settings, machine.system())
        assert path == name or "make -C hls xclbin" in refused.value.remedy


def test_torn_xclbins(tmp_path: Path, machine: Machine) -> None:
    """A truncated xclbin, or one with a section beyond its end, never reaches XRT, which would read past the end."""
    whole, path = xclbin(SMARTSSD), tmp_path / "kernels.xclbin"
    offset_of_first = 456 + 24  # after struct axlf up to its sections, and the section's kind and name
    torn = [whole[:length] for length in [*range(0, 700, 7), *range(700, len(whole), 997), len(whole) - 1]]
    torn += [
        whole[:field] + struct.pack("<Q", value) + whole[field + 8 :]
        for field in (offset_of_first, offset_of_first + 8)  # the section's offset and size
        for value in (2**64 - 1, 2**63, len(whole))
    ]
    torn.append(whole[: 456 - 8] + struct.pack("<I", 2**32 - 1) + whole[456 - 4 :])
    for content in torn:
        path.write_bytes(content)
        with pytest.raises(DeviceError, match="make -C hls xclbin"):
            read_xclbin(SmartSSDConfig(xclbin=path), machine.system())


def test_strategy_wants_an_xclbin(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """update_device="smartssd" needs an xclbin from the settings or the environment, and fp32 state."""
    monkeypatch.delenv(XCLBIN_VARIABLE, raising=False)
    named = SmartSSDConfig(xclbin="a")
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "make -C hls xclbin"),
        ({"state_format": "bf16", "smartssd": named}, r"fp32.*state_format='bf16'"),
        ({"smartssd": "a"}, "not a SmartSSDConfig"),
        ({"smartssd": SmartSSDConfig(xclbin="~nosuch/x")}, r"SmartSSDConfig\(xclbin='~nosuch/x'\) names no file"),
    ]
    for settings, told in refused:
        with pytest.raises(ConfigError, match=told):
            SmartInfinityStrategy(update_device="smartssd", **settings)
    SmartInfinityStrategy(update_device="smartssd", smartssd=named)
    with pytest.warns(UserWarning, match="ignored with update_device='host'"):
        SmartInfinityStrategy(update_device="host", smartssd=named)
    told = r"none is named.*checkout or source distribution.*2021\.2.*2023\.1.*xilinx_u2_gen3x4"
    with pytest.raises(ConfigError, match=told):
        read_xclbin(None, machine.system())
    monkeypatch.setenv(XCLBIN_VARIABLE, "a")
    SmartInfinityStrategy(update_device="smartssd")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"xclbin": ""}, "xclbin=''"),
        ({"xclbin": 3}, "xclbin=3"),
        ({"xclbin": "a\0b"}, r"xclbin='a\\x00b'"),
        ({"devices": []}, "devices=\\[\\]"),
        ({"devices": "0000:01:00.1"}, "devices='0000"),
        ({"devices": [True]}, "devices=\\[True\\]"),
        ({"devices": [-1]}, "devices=\\[-1\\]"),
        ({"devices": [np.True_]}, "devices=.*names no cards"),
        ({"devices": [10**30, 0]}, "devices=\\[10{30}, 0\\].*from 0 to 65535"),
        ({"devices": [10**5000]}, "devices=<too many digits to show>"),
        ({"gradient_route": "gpu"}, "gradient_route='gpu'"),
        ({"binding": "opencl"}, "binding='opencl'"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": 3e6}, "timeout=3000000.0.*at most 2147483"),
        ({"timeout": 10**400}, "timeout=10000"),
        ({"timeout": 10**5000}, "timeout=<too many digits to show>"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], named: str) -> None:
    """A setting out of range is refused when the object is constructed."""
    with pytest.raises(ConfigError, match=named):
        SmartSSDConfig(**settings)  # type: ignore[arg-type]


def test_xrt_that_is_not_set_up(machine: Machine, tmp_path: Path) -> None:
    """XRT is refused if XILINX_XRT is unset or names no folder; the remedy knows that Debian has no setup.sh.

    The version is that of version.json or else, with Debian's XRT, that in the name of the library's file.
    """
    with pytest.raises(DeviceError, match=r"XILINX_XRT is not set.*setup\.sh.*Debian.*export XILINX_XRT=~/xrt$"):
        require_runtime(runtime_of(machine.system()))
    machine.environment["XILINX_XRT"] = str(tmp_path / "xrt")
    with pytest.raises(DeviceError, match="is no folder"):
        require_runtime(runtime_of(machine.system()))
    (tmp_path / "xrt").mkdir()
    require_runtime(runtime_of(machine.system()))
    assert runtime_of(machine.system()).version is None
    start = "7f50 r-xp 00026000 08:01 659 /usr/lib/x86_64-linux-gnu/lib"
    for name, version in (("_core.so.2.13.0", None), ("_coreutil.so.2", None), ("_coreutil.so.2.13.0", "2.13.0")):
        (tmp_path / "maps").write_text(f"{start}c.so.6\n{start}xrt{name}\n{start}m.so.6\n")
        assert runtime_of(machine.system()).version == version
    (tmp_path / "xrt/version.json").write_text('{"BUILD_VERSION": "2.13.466"}')
    assert runtime_of(machine.system()).version == "2.13.466"


def test_choice_of_binding() -> None:
    """The C library is preferred to pyxrt. A binding that is asked for but missing is refused."""
    both, library, module, none = (
        Runtime(Path("/"), None, *present)
        for present in (("libxrt.so", True), ("libxrt.so", False), (None, True), (None, False))
    )
    asked = (("auto", both), ("auto", library), ("auto", module), ("pyxrt", both), ("native", both))
    assert [choose_binding(*each) for each in asked] == ["native", "native", "pyxrt", "pyxrt", "native"]
    with pytest.raises(DeviceError, match="Neither"):
        choose_binding("auto", none)
    with pytest.raises(ConfigError, match=r"binding='native'.*libxrt_coreutil"):
        choose_binding("native", module)
    with pytest.raises(ConfigError, match=r"no module pyxrt.*PYTHONPATH=/opt/xilinx/xrt/python.*Debian 12 has no"):
        choose_binding("pyxrt", library)


def test_everything_at_once(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards are set up for two folders. Disabled P2P and a closed device node are errors with their remedies."""
    monkeypatch.setattr(card_setup, "runtime_of", lambda system: Runtime(tmp_path, None, "libxrt.so", False))
    path = tmp_path / "kernels.xclbin"
    path.write_bytes(xclbin(SMARTSSD))
    for number in range(2):
        smartssd(machine, number, mounted=f"/mnt/nvme{number}")
    machine.card("pci0000:00/0000:00:01.0/0000:01:00.1", minor=140, p2p=f"bar:{SMALL}\nexp_bar:{WHOLE}")
    folders, settings, system = [Path("/mnt/nvme1"), Path("/mnt/nvme0")], SmartSSDConfig(xclbin=path), machine.system()
    setup = find_cards(folders, settings, system)
    assert [card.address for card in setup.cards] == ["0000:52:00.1", "0000:42:00.1"]
    assert (setup.binding, setup.sharers, setup.xclbin.path) == ("native", 1, path)
    off = SmartSSDConfig(xclbin=path, devices=[0, 1])
    with pytest.raises(DeviceError, match=r"P2P of the card 0000:01:00\.1 is disabled.*--p2p enable"):
        find_cards(folders, off, system)
    machine.locked.add(machine.root / "dev/dri/renderD129")
    with pytest.raises(DeviceError, match=r"card 0000:52:00\.1 cannot be opened.*render"):
        find_cards(folders, settings, system)


# ---- the package's kernels are those that ``hls/description.py`` describes


STEPS = {rule.kernel: getattr(native, rule.step) for rule in RULES}


def test_an_optimizer_without_a_kernel() -> None:
    """An optimizer without a kernel is refused by name, with a list of those that have one."""
    with pytest.raises(UnsupportedError, match=r"torch\.optim\.Adamax") as caught:
        of_package.kernel_of("Adamax")
    assert "update_device='host'" in caught.value.remedy and "Adagrad" in caught.value.remedy


def test_kernels_of_the_package() -> None:
    """The package's kernels agree with the description in names, arrays and steps, and with torch's optimizers.

    State after the self-test's steps must be finite, since a card's NaN may have other bits than the host's.
    """
    assert [kernel.name for kernel in of_package.KERNELS] == [kernel.name for kernel in KERNELS]
    for ours, described in zip(of_package.KERNELS, KERNELS, strict=True):
        example = ours.example()
        assert ours.num_arrays == len(described.arrays) and type(example) is STEPS[described.name]
        assert all(getattr(example, word) != 0 for word in described.words)
        gradient, *state = np.random.default_rng(1).standard_normal((1 + len(described.arrays), 50_000), np.float32)
        assert np.isfinite(RULE_OF[type(example)](example, gradient, tuple(map(np.abs, state)))).all()
        for optimizer in ours.rule.optimizers:
            rule = rule_for(getattr(torch.optim, optimizer)([torch.nn.Parameter(torch.zeros(1))]))
            assert rule.name == optimizer and tuple(rule.arrays) == described.arrays


# ---- the file on a card's SSD that gradients pass through


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_it_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_unnamed: bool) -> None:
    """Nothing is left of it, and what others have put there, whatever its name, stays.

    That is so on a file system that can make files without names, and on one that cannot.
    """
    target, folder = tmp_path / "precious", tmp_path / "folder"
    target.write_text("precious")
    folder.mkdir()
    (folder / gradient_files._NAME).symlink_to(target)
    if not has_unnamed:
        refuse_to_open(monkeypatch, errno.EOPNOTSUPP, lambda flags: flags & os.O_TMPFILE == os.O_TMPFILE)
    with ExitStack() as resources:
        file = open_gradient_file(folder, 8192, resources)
        assert file.direct and os.listdir(folder) == [gradient_files._NAME]
    assert target.read_text() == "precious" and (folder / gradient_files._NAME).is_symlink()


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, and its descriptor is closed."""
    full = mock.Mock(side_effect=OSError(28, os.strerror(28)))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with ExitStack() as resources, pytest.raises(StorageError, match=r"Allocating 8192 bytes for .*gradients\.tmp"):
        open_gradient_file(tmp_path, 8192, resources)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(full.call_args.args[0])


# ---- ``smart-infinity selftest`` without a card, or with a card that exists in sysfs only


# The package has a function of that name.
self_test_module = importlib.import_module("lightning_smartinfinity.devices.smartssd.self_test")


@pytest.fixture
def equipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with XRT and no hardware."""
    (tmp_path / "xrt").mkdir()
    (tmp_path / "xrt/version.json").write_text('{"BUILD_VERSION": "2.13.466"}')
    (tmp_path / "kernels.xclbin").write_bytes(xclbin(SMARTSSD))
    monkeypatch.setattr(examination, "runtime_of", lambda _: Runtime(tmp_path / "xrt", "2.13.466", "libxrt.so", False))
    return Machine(tmp_path)


def findings(machine: Machine, *folders: str) -> dict[tuple[str, str], examination.Finding]:
    settings = SmartSSDConfig(xclbin=machine.root / "kernels.xclbin")
    return {(one.subject, one.name): one for one in examine(folders, settings, machine.system())}


def test_what_sysfs_tells_of_cards(equipped: Machine) -> None:
    """The driver, and each card's shell, device node and P2P window are told. Without folders no card is run."""
    smartssd(equipped, 0)
    equipped.card("pci0000:00/0000:00:01.0/0000:01:00.1", minor=140, p2p=f"bar:{1 << 25}\nexp_bar:{4 * GIB}")
    equipped.locked.add(equipped.root / "dev/dri/renderD140")
    found = findings(equipped)
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


def test_pairs_that_cannot_be_worked(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is paired by sysfs. Only opening the card shows that XRT does not know it: one finding, and no work.

    ``~`` in a folder's path is the user's home, as in storage=....
    """
    monkeypatch.setenv("HOME", str(equipped.root))
    smartssd(equipped, 0, mounted=str(equipped.root))
    found = findings(equipped, "~/storage")
    assert found[str(equipped.root / "storage"), "card"].value == "card 0000:42:00.1"
    opened = found["card 0000:42:00.1", "opened"]
    assert "libxrt.so" in opened.value and "shares a PCIe switch" not in opened.value
    assert "selftest" not in opened.remedy and [one for one in found.values() if one.ok is False] == [opened]
    assert findings(equipped, "/")["folders", "pairing"].ok is False


def test_no_card(equipped: Machine) -> None:
    """The finding advises to load XRT's driver only if it is not loaded; a card without it is there, but unusable."""
    found = findings(equipped)["cards", "found"]
    assert found.value == "none: XRT's driver xocl is not loaded" and "modprobe xocl" in found.remedy
    (equipped.sysfs / "bus/pci/drivers/xocl").mkdir(parents=True)
    found = findings(equipped)["cards", "found"]
    assert found.value == "none: XRT's driver xocl holds no card" and "modprobe" not in found.remedy
    equipped.card("pci0000:00/0000:00:01.0/0000:01:00.1", driver=False)
    all_found = findings(equipped)
    assert "0000:01:00.1" in all_found["cards", "driver"].value and ("cards", "found") not in all_found


@pytest.mark.parametrize("why", ["no XRT", "a closed node"])
def test_no_card_is_opened_in_vain(equipped: Machine, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """What keeps a card from being opened is the only finding that fails: opening it would tell the same."""
    smartssd(equipped, 0, mounted=str(equipped.root))
    if why == "no XRT":
        monkeypatch.setattr(examination, "runtime_of", lambda _: Runtime(equipped.root / "gone", None, "lib.so", False))
    else:
        equipped.locked.add(equipped.root / "dev/dri/renderD128")
    failed = [key for key, one in findings(equipped, str(equipped.root)).items() if one.ok is False]
    assert failed == [("XRT", "XILINX_XRT") if why == "no XRT" else ("card 0000:42:00.1", "device node")]


@pytest.mark.parametrize(
    "remedy",
    sorted({*opening._REMEDIES.values(), opening._OTHER_REMEDY, self_test_module._DAMAGED, self_test_module._NO_P2P}),
)
def test_the_command_does_not_advise_itself(equipped: Machine, monkeypatch: pytest.MonkeyPatch, remedy: str) -> None:
    """Advice to run this command is left out of its findings; the rest of the remedy stays."""
    monkeypatch.setattr(examination, "open_card", mock.Mock(side_effect=DeviceError("The card fails.", remedy)))
    smartssd(equipped, 0, mounted=str(equipped.root))
    shown = findings(equipped, str(equipped.root))["card 0000:42:00.1", "opened"].remedy
    assert shown and remedy.startswith(shown) and "selftest" not in shown


def test_a_machine_with_nothing(monkeypatch: pytest.MonkeyPatch, cli: Cli, tmp_path: Path) -> None:
    """Each missing part is reported with a remedy, and the exit status is 1."""
    for name in ("XILINX_XRT", "XCL_EMULATION_MODE", XCLBIN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    shown = cli("selftest", tmp_path, status=1).out
    assert all(told in shown for told in ("FAIL  XILINX_XRT", "setup.sh", "make -C hls xclbin", "FAIL  pairing"))
    content = json.loads(cli("selftest", "--json", status=1).out)
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
def test_options_out_of_range(cli: Cli, arguments: list[str], wanted: str) -> None:
    """An option out of range ends the command with a short message that says what is allowed."""
    shown = cli("selftest", *arguments, status=2).err
    assert wanted in shown and len(shown) < 1000


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
def test_folders_that_training_refuses(equipped: Machine, folders: list[str], words: str) -> None:
    """Folders that training refuses are refused here, and no card is paired. The other checks still run."""
    found = findings(equipped, *folders)
    assert found["folders", "named"].ok is False and words in found["folders", "named"].value
    assert ("folders", "pairing") not in found and found["xclbin", "file"].ok


def test_what_nobody_foresaw(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception becomes a failed finding, and the other checks still run."""
    breaks = mock.Mock(side_effect=LookupError("a file of sysfs says so"))
    monkeypatch.setattr(examination, "read_xclbin", breaks)
    monkeypatch.setattr(examination, "cards_of", breaks)
    found = findings(equipped)
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
