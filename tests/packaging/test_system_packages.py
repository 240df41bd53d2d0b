"""``tools/system_packages.sh`` and ``tools/test_packages.sh`` with stand-ins for id, apt-get, compilers and Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.waiting import PROCESS_LIMIT

TOOLS = Path(__file__).parents[2] / "tools"
COMMANDS = ("bash", "env", "xargs", "cat", "touch", "chmod", "echo", "mkdir")
PYTHON = """
case "$*" in
  *version_info*) exit {old} ;;
  *ensurepip*) exit {venv} ;;
  --version) echo "Python 3.8.1" ;;
esac
cat >/dev/null
exit {headers}
"""
INSTALL = "apt-get install -q -y --no-install-recommends"
XRT = ("usr/lib/x86_64-linux-gnu/libxrt_noop.so.2.13.0", "usr/include/xrt/version.h", "usr/include/uuid/uuid.h")
MACHINES = ("usr/bin/bindfs", "usr/sbin/ip")


class System:
    """A folder of commands that replaces the whole PATH, and a folder of the system's files."""

    def __init__(self, folder: Path, *, root: bool = True) -> None:
        self.commands, self.root = folder / "commands", folder / "root"
        self.commands.mkdir()
        for tool in COMMANDS:
            (self.commands / tool).symlink_to(Path("/usr/bin", tool))
        self.add("id", f"echo {0 if root else 1000}")

    def add(self, name: str, source: str = "") -> None:
        (self.commands / name).write_text(f"#!/usr/bin/env bash\n{source}\n")
        (self.commands / name).chmod(0o755)

    def add_files(self, *files: str) -> None:
        for file in files:
            (self.root / file).parent.mkdir(parents=True, exist_ok=True)
            (self.root / file).touch()

    def add_apt(self, *paths: Path) -> None:
        """Add an apt-get whose packages hold these files; without files it fails to install."""
        install = "".join(f"\nmkdir -p {path.parent}; touch {path}; chmod +x {path}" for path in paths)
        self.add("apt-get", f'echo "apt-get $*"\n[ "$1" = install ] || exit 0{install}{"" if paths else "; exit 1"}')

    def run(self, script: str, argument: str | Path) -> tuple[int, str]:
        completed = subprocess.run(
            ["/usr/bin/bash", TOOLS / script, argument],
            env={"PATH": str(self.commands)},
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
        )
        return completed.returncode, completed.stdout + completed.stderr


@pytest.mark.parametrize(
    ("lacks", "root", "apt", "status", "says"),
    [
        pytest.param("", True, "never", 0, [], id="complete"),
        pytest.param("g++", True, "g++", 0, [f"{INSTALL} g++"], id="compiler"),
        pytest.param("g++", False, "g++", 1, ["this system lacks: g++"], id="compiler, not root"),
        pytest.param("g++", True, None, 1, ["this system lacks: g++"], id="compiler, without apt-get"),
        pytest.param("liburing", True, "liburing", 0, [f"{INSTALL} liburing-dev"], id="liburing"),
        pytest.param("liburing", False, "never", 0, ["lacks liburing-dev"], id="liburing, not root"),
        pytest.param("liburing", True, "", 0, ["liburing-dev could not be installed"], id="liburing, without package"),
        pytest.param("venv headers", False, None, 1, ["lacks: python3-venv python3-dev"], id="two packages"),
        pytest.param("headers", True, "other", 1, ["still missing after apt-get: python3-dev"], id="own Python"),
        pytest.param("old", True, None, 1, ["Python 3.8.1", "make setup PYTHON="], id="old Python"),
        pytest.param("python3", True, None, 1, ["Python 3.10 or newer"], id="no Python"),
    ],
)
def test_system_packages(lacks: str, root: bool, apt: str | None, status: int, says: list[str], tmp_path: Path) -> None:
    """What is missing is installed by root with apt-get, or else named; liburing is optional."""
    system = System(tmp_path, root=root)
    if "python3" not in lacks:
        system.add("python3", PYTHON.format(**{part: int(part in lacks) for part in ("old", "venv", "headers")}))
    if "g++" not in lacks:
        system.add("g++", "exit 1" if "liburing" in lacks else "")
    if apt is not None:
        system.add_apt(*([system.commands / apt] if apt else []))
    ended, output = system.run("system_packages.sh", "python3")
    assert ended == status
    assert all(words in output for words in says) and (says or output == "")
    assert ("apt-get install -q" in output) == (root and apt not in (None, "never"))


@pytest.mark.parametrize(
    ("missing", "packages", "skipped"),
    [
        (XRT[0], "libxrt1 libxrt-dev uuid-dev", "lacks XRT 2.13"),
        (XRT[2], "libxrt1 libxrt-dev uuid-dev", "lacks XRT 2.13"),
        (MACHINES[0], "bindfs iproute2", "lacks bindfs"),
        (MACHINES[1], "bindfs iproute2", "lacks bindfs"),
    ],
)
@pytest.mark.parametrize("root", [True, False])
def test_packages_of_tests(missing: str, packages: str, skipped: str, root: bool, tmp_path: Path) -> None:
    """Root gets the packages; others are told which tests are skipped. A complete system is left alone."""
    system = System(tmp_path, root=root)
    system.add_files(*{*XRT, *MACHINES} - {missing})
    system.add_apt(system.root / missing)
    status, output = system.run("test_packages.sh", system.root)
    assert status == 0
    assert (f"{INSTALL} {packages}" in output) == root
    assert (skipped in output and "will be skipped" in output) == (not root)
    system.add_files(missing)
    assert system.run("test_packages.sh", system.root) == (0, "")


@pytest.mark.parametrize(
    ("held", "says"), [((), "could not be installed"), ((XRT[0].replace("2.13", "2.17"),), "are not those of XRT 2.13")]
)
def test_packages_of_tests_that_cannot_be_had(held: tuple[str, ...], says: str, tmp_path: Path) -> None:
    """A failed installation and another version are no error."""
    system = System(tmp_path)
    system.add_files(*XRT[1:], *MACHINES)
    system.add_apt(*(system.root / file for file in held))
    status, output = system.run("test_packages.sh", system.root)
    assert status == 0 and says in output
