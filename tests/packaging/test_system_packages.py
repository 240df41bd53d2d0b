"""``tools/system_packages.sh`` on incomplete systems, simulated by stand-ins for id, apt-get and Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.waiting import PROCESS_LIMIT

SCRIPT = Path(__file__).parents[2] / "tools" / "system_packages.sh"
# The script itself runs these.
TOOLS = ("bash", "env", "xargs", "cat", "touch", "chmod", "echo")
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *version_info*) exit {too_old} ;;
  *ensurepip*) exit {no_venv} ;;
  --version) echo "Python 3.8.1" ;;
esac
cat >/dev/null
exit {no_headers}
"""


class System:
    """A folder of commands that replaces the whole PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for tool in TOOLS:
            (folder / tool).symlink_to(Path("/usr/bin", tool))
        self.add("python3", PYTHON.format(too_old=0, no_venv=0, no_headers=0))
        self.add("g++")
        self.be(root=True)

    def add(self, name: str, source: str = "#!/usr/bin/env bash\n") -> None:
        (self.folder / name).write_text(source)
        (self.folder / name).chmod(0o755)

    def be(self, *, root: bool) -> None:
        self.add("id", f"#!/usr/bin/env bash\necho {0 if root else 1000}\n")

    def add_apt(self, *, installs: str) -> None:
        """Add an apt-get that creates one command when it is asked to install something."""
        command = f'{{ echo "apt-get $*"; [ "$1" != install ] || {{ touch {self.folder}/{installs}; '
        command += f"chmod +x {self.folder}/{installs}; }}; }}"
        self.add("apt-get", f"#!/usr/bin/env bash\n{command}\n")

    def run(self) -> tuple[int, str]:
        completed = subprocess.run(
            ["/usr/bin/env", "bash", SCRIPT, "python3"],
            env={"PATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
        )
        return completed.returncode, completed.stdout + completed.stderr


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_complete_system_is_left_alone(system: System) -> None:
    """A complete system gets no installation and no message, even as root."""
    system.add_apt(installs="never")
    assert system.run() == (0, "")


def test_missing_compiler_is_installed_as_root(system: System) -> None:
    """Root on a system with apt-get gets the compiler."""
    (system.folder / "g++").unlink()
    system.add_apt(installs="g++")
    status, output = system.run()
    assert status == 0
    assert "apt-get install -q -y --no-install-recommends g++" in output


COMPILER_WITHOUT_LIBURING = """#!/usr/bin/env bash
exit 1
"""


def test_missing_liburing_is_installed_as_root(system: System) -> None:
    """Root on a system with apt-get also gets liburing."""
    system.add("g++", COMPILER_WITHOUT_LIBURING)
    system.add_apt(installs="liburing")
    status, output = system.run()
    assert status == 0
    assert "apt-get install -q -y --no-install-recommends liburing-dev" in output


@pytest.mark.parametrize("root", [True, False], ids=["without apt-get", "not root"])
def test_missing_liburing_is_no_error(root: bool, system: System) -> None:
    """The script succeeds without it and names the package."""
    system.add("g++", COMPILER_WITHOUT_LIBURING)
    system.be(root=root)
    if not root:
        system.add_apt(installs="never")
    status, output = system.run()
    assert status == 0
    assert "liburing-dev" in output and "apt-get install" not in output


def test_liburing_that_cannot_be_installed_is_no_error(system: System) -> None:
    """A failed installation is not an error, as on a system with older packages."""
    system.add("g++", COMPILER_WITHOUT_LIBURING)
    system.add("apt-get", '#!/usr/bin/env bash\n[ "$1" != install ]\n')
    status, output = system.run()
    assert status == 0
    assert "liburing-dev could not be installed" in output


@pytest.mark.parametrize("root", [True, False], ids=["without apt-get", "not root"])
def test_missing_compiler_is_named_where_it_cannot_be_installed(root: bool, system: System) -> None:
    """The message names the package, and nothing is installed."""
    (system.folder / "g++").unlink()
    system.be(root=root)
    if not root:
        system.add_apt(installs="g++")
    status, output = system.run()
    assert status == 1
    assert "this system lacks: g++" in output
    assert "apt-get install" in output
    assert not (system.folder / "g++").exists()


def test_missing_venv_and_headers_are_named_together(system: System) -> None:
    """One message names all that is missing."""
    system.add("python3", PYTHON.format(too_old=0, no_venv=1, no_headers=1))
    system.be(root=False)
    status, output = system.run()
    assert status == 1
    assert "this system lacks: python3-venv python3-dev" in output


def test_installation_that_does_not_help_is_an_error(system: System) -> None:
    """A Python that the user built does not get its headers from the system's packages."""
    system.add("python3", PYTHON.format(too_old=0, no_venv=0, no_headers=1))
    system.add_apt(installs="unrelated")
    status, output = system.run()
    assert status == 1
    assert "still missing after apt-get: python3-dev" in output


def test_old_python_is_refused(system: System) -> None:
    """The message gives the version and says how to name another Python."""
    system.add("python3", PYTHON.format(too_old=1, no_venv=0, no_headers=0))
    status, output = system.run()
    assert status == 1
    assert "Python 3.8.1" in output
    assert "make setup PYTHON=" in output


def test_no_python_at_all(system: System) -> None:
    """The message says what to install."""
    (system.folder / "python3").unlink()
    status, output = system.run()
    assert status == 1
    assert "Python 3.10 or newer" in output
