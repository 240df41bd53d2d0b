"""``smart-infinity card-report`` with a v++ that writes its calls down, and without anything."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.cli import card_build, card_report, main, report_archive
from tests.helpers.waiting import await_that

FAKE = f"""#!{sys.executable}
import json, pathlib, sys
arguments = sys.argv[1:]
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
step = "link" if "--link" in arguments else "compile"
if (here / f"fail-{{step}}").exists():
    sys.exit(f"ERROR: [HLS 200-70] no {{step}}")
if step == "compile" and not (here / "fail-csynth").exists():
    folder = pathlib.Path(arguments[arguments.index("--temp_dir") + 1]) / "syn"
    folder.mkdir(parents=True, exist_ok=True)
    kernel = arguments[arguments.index("--kernel") + 1]
    figures = "".join(f"<{{tag}}>{{number}}</{{tag}}>" for tag, number in
                      dict(BRAM_18K=90, URAM=32, FF=7000, LUT=60000, DSP=20).items())
    (folder / f"{{kernel}}_csynth.xml").write_text(
        f"<profile><AreaEstimates><Resources>{{figures}}</Resources></AreaEstimates></profile>")
pathlib.Path(arguments[arguments.index("--output") + 1]).write_text("built")
"""
BUILD = ("xo", "csynth", "link")


class Tools:
    """A work folder, and a v++ that can be told to fail."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.bin = folder / "bin"
        self.bin.mkdir()
        (self.bin / "v++").write_text(FAKE)
        (self.bin / "v++").chmod(0o755)

    def fail(self, step: str, *, wanted: bool = True) -> None:
        (self.bin / f"fail-{step}").touch() if wanted else (self.bin / f"fail-{step}").unlink()

    def run(self, *stages: str) -> int:
        return main(["card-report", "--work", str(self.work), "--stage", *stages])

    def result(self, stage: str) -> dict[str, Any]:
        return dict(json.loads((self.work / f"{stage}.json").read_text()))

    def calls(self) -> list[list[str]]:
        file = self.bin / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def linked(self) -> dict[str, Any]:
        """Return the result of the stage link once it has ended."""

        def ended() -> bool:
            self.run("link")
            return self.result("link")["status"] != "running"

        await_that(ended)
        return self.result("link")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    tools = Tools(tmp_path)
    monkeypatch.setenv("PATH", f"{tools.bin}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tools


def test_the_smallest_kernel_comes_first_and_is_kept(tools: Tools) -> None:
    """One kernel is compiled and its figures are set beside the expected ones. A second run compiles nothing."""
    assert tools.run("xo", "csynth") == 0
    (call,) = tools.calls()
    assert call[call.index("--kernel") + 1] == "sgd_update"
    figures = tools.result("csynth")["figures"]
    assert {name: figure["reported"] for name, figure in figures.items()} == {
        "ii": None, "bram": 45, "uram": 32, "ff": 7000, "lut": 60000, "dsp": 20,
    }  # fmt: skip
    assert figures["ii"]["expected"] == 8 and figures["uram"]["expected"] == 32
    assert tools.run("xo", "csynth") == 0
    assert len(tools.calls()) == 1


def test_it_stops_at_the_first_error_of_hls(tools: Tools) -> None:
    """After a failed compilation nothing else is built; the next run goes on from there."""
    tools.fail("compile")
    assert tools.run(*BUILD) == 1
    assert len(tools.calls()) == 1
    assert "HLS 200-70" in "".join(tools.result("xo")["output"])
    assert [tools.result(stage)["status"] for stage in BUILD] == ["failed", "skipped", "skipped"]
    assert "xo has not succeeded" in tools.result("link")["reason"]
    tools.fail("compile", wanted=False)
    assert tools.run("xo", "csynth") == 0


def test_no_report_of_hls(tools: Tools) -> None:
    """A v++ that leaves no csynth.xml fails that stage alone."""
    tools.fail("csynth")
    assert tools.run("xo", "csynth") == 1
    assert tools.result("xo")["status"] == "done" and "no csynth.xml" in tools.result("csynth")["reason"]


def test_linking_runs_in_the_background(tools: Tools) -> None:
    """The first run begins it, a later one finds it done; a link that failed is told and begun again."""
    tools.fail("link")
    assert tools.run("xo", "link") == 0 and tools.result("link")["status"] == "running"
    failed = tools.linked()
    assert failed["status"] == "failed" and "no link" in "".join(failed["output"])
    tools.fail("link", wanted=False)
    assert tools.linked()["status"] == "done"
    assert card_build.xclbin_in(tools.work).read_text() == "built"


def test_what_is_skipped_says_why(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that need XRT, or the kernels' sources, name what is missing."""
    monkeypatch.setattr(card_build, "CHECKOUT", tools.work)
    monkeypatch.setattr("lightning_smartinfinity.devices.smartssd.discovery.runtime.runtime_of", _no_runtime)
    assert tools.run("driver", "selftest", "xo") == 0
    assert "no XRT" in tools.result("driver")["reason"] and "no XRT" in tools.result("selftest")["reason"]
    assert "not in the installed package" in tools.result("xo")["reason"]


def test_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One page tells what to install, and nothing is written."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("lightning_smartinfinity.devices.smartssd.discovery.runtime.runtime_of", _no_runtime)
    assert main(["card-report", "--work", str(tmp_path / "work")]) == 1
    told = capsys.readouterr().out
    assert told == card_report._TO_INSTALL and len(told.splitlines()) < 40
    assert not (tmp_path / "work").exists()


def test_the_archive_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host, user, home, serial numbers and the named places are left out; PCI addresses stay."""
    monkeypatch.setattr(socket, "gethostname", lambda: "lab7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    text = "ada@lab7: /home/ada/x /root/y lab7.example.org /srv/secret/z Serial Number: 12XYZ card 0000:42:00.1 adapter"
    report_archive.pack(tmp_path / "a.tar.gz", {"one": {"reason": [text]}}, places={"/srv/secret": "FOLDER0"})
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        (entry,) = packed.getmembers()
        content = packed.extractfile(entry)
        assert content is not None
        (told,) = json.load(content)["reason"]
    assert told == "USER@HOST: HOME/x HOME/y HOST FOLDER0/z Serial Number: SERIAL card 0000:42:00.1 adapter"
    assert (entry.uname, entry.gname, entry.uid, entry.mtime) == ("", "", 0, 0)


def _no_runtime(system: object) -> Any:
    from lightning_smartinfinity.devices.smartssd.discovery.runtime import Runtime

    return Runtime(None, None, None, False)
