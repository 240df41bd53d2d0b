"""``tools/test_packages.sh`` on systems with and without XRT and bindfs, simulated by stand-ins for id and apt-get."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.waiting import PROCESS_LIMIT

SCRIPT = Path(__file__).parents[2] / "tools" / "test_packages.sh"
OF_MACHINES = ("usr/bin/bindfs", "usr/sbin/ip")
FILES = ("usr/lib/x86_64-linux-gnu/libxrt_noop.so.2.13.0", "usr/include/xrt/version.h", "usr/include/uuid/uuid.h")


class System:
    """A folder with a system's files, and one with commands that replaces the whole PATH."""

    def __init__(self, folder: Path) -> None:
        self.root, self.commands = folder / "root", folder / "commands"
        self.commands.mkdir()
        for tool in ("bash", "mkdir", "touch"):
            (self.commands / tool).symlink_to(Path("/usr/bin", tool))
        self.be(root=True)
        self.have(*OF_MACHINES)

    def have(self, *files: str) -> None:
        for file in files:
            (self.root / file).parent.mkdir(parents=True, exist_ok=True)
            (self.root / file).touch()

    def add(self, name: str, source: str) -> None:
        (self.commands / name).write_text(f"#!/usr/bin/env bash\n{source}\n")
        (self.commands / name).chmod(0o755)

    def be(self, *, root: bool) -> None:
        self.add("id", f"echo {0 if root else 1000}")

    def add_apt(self, *files: str) -> None:
        """Add an apt-get whose packages hold these files."""
        paths = [self.root / file for file in files]
        install = "".join(f"\nmkdir -p {path.parent}; touch {path}" for path in paths)
        self.add("apt-get", f'echo "apt-get $*"\n[ "$1" = install ] || exit 0{install}')

    def run(self) -> str:
        completed = subprocess.run(
            ["/usr/bin/bash", SCRIPT, self.root],
            env={"PATH": str(self.commands)},
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
        )
        assert completed.returncode == 0
        return completed.stdout + completed.stderr


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_system_with_xrt_is_left_alone(system: System) -> None:
    """A complete system gets no installation and no message, even as root."""
    system.have(*FILES)
    system.add_apt()
    assert system.run() == ""


@pytest.mark.parametrize("missing", FILES)
def test_missing_xrt_is_installed_as_root(system: System, missing: str) -> None:
    """The packages that tests need are installed if any file is missing."""
    system.have(*set(FILES) - {missing})
    system.add_apt(*FILES)
    output = system.run()
    assert "apt-get install -q -y --no-install-recommends libxrt1 libxrt-dev uuid-dev" in output
    assert "skipped" not in output


@pytest.mark.parametrize("root", [True, False], ids=["without apt-get", "not root"])
def test_missing_xrt_is_named_where_it_cannot_be_installed(root: bool, system: System) -> None:
    """The script succeeds, and the note says which tests are skipped."""
    system.be(root=root)
    if not root:
        system.add_apt(*FILES)
    output = system.run()
    assert "lacks XRT 2.13 (libxrt1 libxrt-dev" in output and "SmartSSDs will be skipped" in output
    assert "apt-get install" not in output


def test_xrt_that_cannot_be_installed_is_no_error(system: System) -> None:
    """A failed installation is not an error, as on a system without such a package."""
    system.add("apt-get", '[ "$1" != install ]')
    assert "could not be installed" in system.run()


def test_xrt_of_another_version_is_no_error(system: System) -> None:
    """Another version is not an error, as on a newer system."""
    system.add_apt("usr/lib/x86_64-linux-gnu/libxrt_noop.so.2.17.0", *FILES[1:])
    assert "are not those of XRT 2.13" in system.run()


@pytest.mark.parametrize("missing", OF_MACHINES)
def test_what_two_machines_need(missing: str, system: System) -> None:
    """It is installed by itself, and where it cannot be, the note says which tests are skipped."""
    system.have(*FILES)
    (system.root / missing).unlink()
    system.be(root=False)
    assert "lacks bindfs (bindfs iproute2 of Debian 12): tests on two machines will be skipped" in system.run()
    system.be(root=True)
    system.add_apt(*OF_MACHINES)
    output = system.run()
    assert "apt-get install -q -y --no-install-recommends bindfs iproute2" in output and "skipped" not in output
