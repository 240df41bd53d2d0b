"""``tools/system_packages.sh`` and ``tools/gpu_report.sh`` with stand-ins for id, apt-get, compilers and Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.waiting import PROCESS_LIMIT

SCRIPT = Path(__file__).parents[2] / "tools/system_packages.sh"
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


class System:
    """A folder of commands that replaces the whole PATH."""

    def __init__(self, folder: Path, *, root: bool = True) -> None:
        self.commands = folder / "commands"
        self.commands.mkdir()
        for tool in COMMANDS:
            (self.commands / tool).symlink_to(Path("/usr/bin", tool))
        self.add("id", f"echo {0 if root else 1000}")

    def add(self, name: str, source: str = "") -> None:
        (self.commands / name).write_text(f"#!/usr/bin/env bash\n{source}\n")
        (self.commands / name).chmod(0o755)

    def add_apt(self, *paths: Path) -> None:
        """Add an apt-get whose packages hold these files; without files it fails to install."""
        install = "".join(f"\nmkdir -p {path.parent}; touch {path}; chmod +x {path}" for path in paths)
        self.add("apt-get", f'echo "apt-get $*"\n[ "$1" = install ] || exit 0{install}{"" if paths else "; exit 1"}')

    def run(self) -> tuple[int, str]:
        completed = subprocess.run(
            ["/usr/bin/bash", SCRIPT, "python3"],
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
    ended, output = system.run()
    assert ended == status
    assert all(words in output for words in says) and (says or output == "")
    assert ("apt-get install -q" in output) == (root and apt not in (None, "never"))


GPU_REPORT = Path(__file__).parents[2] / "tools" / "gpu_report.sh"
STAGES = ("nvidia-smi", "versions", "build", "tests", "step", "budgets", "activations")


def report(root: Path, python: str, storage: Path) -> tuple[int, dict[str, str]]:
    """Run the script with a Python that is a shell script, and return its status and the results of its stages."""
    for name, content in (("python", python), ("nvidia-smi", "echo a GPU")):
        (root / name).write_text(f"#!/bin/bash\n{content}\n")
        (root / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{root}:{os.environ['PATH']}", "PYTHON": "python"}
    done = subprocess.run([GPU_REPORT, root / "results", storage], env=environment, timeout=PROCESS_LIMIT, check=False)
    lines = (root / "results" / "report.txt").read_text().splitlines()[1:]
    return done.returncode, {line.split()[0]: line[13:22].strip() for line in lines}


def test_all_stages_pass(tmp_path: Path) -> None:
    """The results are the outputs; what was built is removed, a folder on the drive that was given stays."""
    storage = tmp_path / "drive"
    assert report(tmp_path, 'echo "$@"', storage) == (0, dict.fromkeys(STAGES, "passed"))
    assert f"--storage {storage}" in (tmp_path / "results" / "step.txt").read_text()
    assert {path.suffix for path in (tmp_path / "results").iterdir()} == {".txt"} and storage.is_dir()


def test_stages_that_fail(tmp_path: Path) -> None:
    """The others run, the report says which failed, and so does the exit status."""
    status, found = report(tmp_path, '[[ "$*" != *install* && "$*" != *gpu_step* ]]', tmp_path / "results/storage")
    assert (status, found["build"], found["tests"], found["step"]) == (1, "failed:1", "passed", "failed:1")
