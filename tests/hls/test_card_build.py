"""Tests the build for the card with a v++ that only records how it was called."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from hls.description import SMARTSSD
from tests.helpers.waiting import PROCESS_LIMIT

ROOT = Path(__file__).parents[2]
SHELL = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"

FAKE = f"""#!{sys.executable}
import json, pathlib, sys
arguments = sys.argv[1:]
with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
pathlib.Path(arguments[arguments.index("--output") + 1]).write_text("built")
"""


class Toolchain:
    """Runs hls/Makefile, with the fake v++ first on PATH, and reads the arguments that it was called with."""

    def __init__(self, folder: Path) -> None:
        self.card = folder / "card"
        self._tools = folder / "tools"
        self._tools.mkdir()

    def install(self, vitis: str = FAKE) -> None:
        (self._tools / "v++").write_text(vitis)
        (self._tools / "v++").chmod(0o755)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run make in hls/, where no other v++ can be found, in a process group of its own."""
        path = f"{self._tools}:{Path(sys.executable).parent}:/usr/bin:/bin"
        command = ["make", "-C", str(ROOT / "hls"), f"CARD={self.card}", *arguments]
        # These variables are for a make that another make calls, which this one is not.
        kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        return subprocess.run(
            command,
            env=kept | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
            start_new_session=True,
        )

    def calls(self) -> list[list[str]]:
        """Return the arguments of each call of v++ since the last time."""
        written = self._tools / "calls"
        lines = written.read_text().splitlines() if written.exists() else []
        written.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    toolchain = Toolchain(tmp_path)
    toolchain.install()
    return toolchain


def test_xclbin_compiles_every_kernel_and_links_them(toolchain: Toolchain) -> None:
    """Every call of v++ is complete and consistent with the description and with the other calls.

    Each step has its own folders for logs and temporary files below the build's, so steps may run side by side. A
    kernel's source rebuilds its object and the link, a header everything, as each step takes hours.
    """
    built = toolchain.make("-j4", "xclbin")
    assert built.returncode == 0, built.stderr
    xclbin = toolchain.card / "smart_infinity.xclbin"
    assert xclbin.exists() and f'SmartSSDConfig(xclbin="{xclbin}")' in built.stdout
    *compiled, linked = toolchain.calls()
    options = [_options(call) for call in compiled]
    assert {option["--kernel"] for option in options} == {kernel.name for kernel in SMARTSSD.kernels}
    for call, option in zip(compiled, options, strict=True):
        assert "--compile" in call and "--link" not in call
        assert f"void {option['--kernel']}(" in (ROOT / call[-1]).read_text()
        assert (Path(option["-I"]) / "card_kernels.hpp").exists() and {"hls/include", "hls/kernels"} <= set(call)
    assert "--link" in linked and "--compile" not in linked
    assert Path(_options(linked)["--output"]).name == xclbin.name
    objects = sorted(part for part in linked if part.endswith(".xo"))
    assert objects == sorted(str(toolchain.card / Path(option["--output"]).name) for option in options)
    assert all(Path(path).read_text() == "built" for path in objects)
    options.append(_options(linked))
    for option in options:
        assert (option["--target"], option["--platform"]) == ("hw", SHELL)
        assert option["--kernel_frequency"] == str(SMARTSSD.platform.clock_mhz)
    for kind in ("--temp_dir", "--log_dir", "--report_dir"):
        folders = {option[kind] for option in options}
        assert len(folders) == 4 and all(Path(folder).is_relative_to(toolchain.card) for folder in folders)
    # The link is told of every compute unit.
    lines = Path(_options(linked)["--config"]).read_text().splitlines()
    named = {line.removeprefix("nk=").split(":")[0]: line.split(":")[2].split(".") for line in lines[1:]}
    assert lines[0] == "[connectivity]" and named.keys() == {option["--kernel"] for option in options[:-1]}
    assert [name for names in named.values() for name in names] == [unit.name for unit in SMARTSSD.compute_units]
    for changed, steps in (
        ((), []),
        (("-W", "kernels/sgd_update.hpp"), ["sgd_update", "link"]),
        (("-W", "include/gradient.hpp"), [*named, "link"]),
    ):
        toolchain.make("xclbin", *changed)
        assert sorted(_options(call).get("--kernel", "link") for call in toolchain.calls()) == sorted(steps)


def test_an_xclbin_for_another_optimizer(toolchain: Toolchain) -> None:
    """OPTIMIZER= chooses the design that has its kernel."""
    assert toolchain.make("xclbin", "OPTIMIZER=rmsprop").returncode == 0
    compiled, linked = map(_options, toolchain.calls())
    assert compiled["--kernel"] == "rmsprop_update"
    assert Path(linked["--config"]).read_text().splitlines()[1:] == ["nk=rmsprop_update:1:rmsprop_update_1"]


def test_without_the_toolchain_it_says_what_it_takes(tmp_path: Path) -> None:
    """Without the toolchain the error says what is needed, not that a command was not found."""
    failed = Toolchain(tmp_path).make("xclbin")
    assert failed.returncode != 0
    assert "there is no v++ on PATH" in failed.stderr
    assert "Vitis 2021.2 to 2023.1" in failed.stderr and SHELL in failed.stderr
    assert not (tmp_path / "card").exists()


@pytest.mark.parametrize(
    ("vitis", "status", "told"),
    [
        (FAKE + 'sys.exit("no licence")\n', 2, "no licence"),
        (f"#!{sys.executable}\n", 2, "adamw_update.xo"),  # it ends well without an object
        (FAKE + "import os, signal\nos.killpg(0, signal.SIGKILL)\n", -signal.SIGKILL, ""),
    ],
    ids=["fails", "writes nothing", "is killed"],
)
def test_a_step_that_does_not_end_well(toolchain: Toolchain, vitis: str, status: int, told: str) -> None:
    """It leaves nothing that looks built, also where make cannot remove it: the next make begins with it again."""
    toolchain.install(vitis)
    failed = toolchain.make("xo")
    assert failed.returncode == status and told in failed.stderr
    assert list(toolchain.card.glob("*.xo")) == [] and len(toolchain.calls()) <= 1
    toolchain.install()
    assert toolchain.make("xo").returncode == 0 and len(toolchain.calls()) == 3


def _options(call: list[str]) -> dict[str, str]:
    """Return the options of a call that have a value."""
    return {name: value for name, value in pairwise(call) if name.startswith("-")}
