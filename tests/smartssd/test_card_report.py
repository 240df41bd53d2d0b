"""``smart-infinity card-report`` with a v++ that writes its calls down, and without anything."""

from __future__ import annotations

import errno
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hls.description import SMARTSSD
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.smartssd import archive as report_archive, build as card_build, report as card_report
from lightning_smartinfinity.devices.smartssd import examination
from lightning_smartinfinity.devices.smartssd.discovery.runtime import Runtime
from lightning_smartinfinity.devices.smartssd.examination import Finding
from lightning_smartinfinity.settings.smartssd import XCLBIN_VARIABLE
from tests.helpers.processes import REPOSITORY
from tests.helpers.waiting import LIMIT, await_that

FAKE = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time, zipfile
arguments = sys.argv[1:]
here = pathlib.Path(__file__).parent
output = pathlib.Path(arguments[arguments.index("--output") + 1])
if output.exists():  # as make would find it
    sys.exit()
output.parent.mkdir(parents=True, exist_ok=True)
with open(here / "calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
step = "link" if "--link" in arguments else "compile"
if step == "link":
    (here / "group").write_text(str(os.getpgrp()))
if (here / f"deaf-{{step}}").exists():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"pid-{{step}}").write_text(str(os.getpid()))
while (here / f"hold-{{step}}").exists():
    time.sleep(0.01)
if (here / f"fail-{{step}}").exists():
    sys.exit(f"ERROR: [HLS 200-70] no {{step}}")
if step == "compile" and not (here / "fail-csynth").exists():
    folder = pathlib.Path(arguments[arguments.index("--temp_dir") + 1]) / "syn"
    folder.mkdir(parents=True, exist_ok=True)
    kernel = arguments[arguments.index("--kernel") + 1]
    figures = "".join(f"<{{tag}}>{{number}}</{{tag}}>" for tag, number in
                      dict(BRAM_18K=90, URAM=32, FF=7000, LUT=60000, DSP=20).items())
    whole = f"<AreaEstimates><Resources>{{figures}}</Resources></AreaEstimates>"
    loops = "<SummaryOfLoopLatency><beats><PipelineII>9</PipelineII></beats></SummaryOfLoopLatency>"
    module = f"<Module><Name>compute</Name><PerformanceEstimates>{{loops}}</PerformanceEstimates></Module>"
    modules = f"<ModuleInformation>{{module}}</ModuleInformation>"
    for name, content in (f"{{kernel}}_csynth", whole), ("csynth", whole + modules):
        (folder / f"{{name}}.xml").write_text(f"<profile>{{content}}</profile>")
if step == "link" or (here / "fail-whole").exists():
    output.write_text("built")
else:
    zipfile.ZipFile(output, "w").close()
"""
BUILD = ("xo", "csynth", "link")
RUNTIME_OF = "lightning_smartinfinity.devices.smartssd.discovery.runtime.runtime_of"


class Tools:
    """A work folder, and a v++ that can be told to fail."""

    def __init__(self, folder: Path) -> None:
        self.work, self.bin = folder / "work", folder / "bin"
        self.bin.mkdir()
        (self.bin / "v++").write_text(FAKE)
        (self.bin / "v++").chmod(0o755)

    def tell(self, what: str, *, wanted: bool = True) -> None:
        """Let v++ ``fail`` in a step, ``hold`` it, or be ``deaf`` to signals in it, from now on or no longer."""
        (self.bin / what).touch() if wanted else (self.bin / what).unlink()

    def run(self, *stages: str, cards: tuple[str, ...] = ()) -> int:
        return main(["card-report", *cards, "--work", str(self.work), "--stage", *stages])

    def start(self, *stages: str) -> subprocess.Popen[str]:
        """Start the command as a process of its own, which heeds Ctrl-C even if the tests run in the background."""
        command = [sys.executable, "-m", "lightning_smartinfinity.cli", "card-report", "--work", str(self.work)]
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen([*command, "--stage", *stages], stderr=subprocess.PIPE, text=True, preexec_fn=heed)

    def pid(self, step: str) -> int:
        """Return the process of v++ that began last, once it has begun."""
        file = self.bin / f"pid-{step}"
        await_that(lambda: file.exists() and file.read_text() != "")
        return int(file.read_text())

    def result(self, stage: str) -> dict[str, Any]:
        return dict(json.loads((self.work / f"{stage}.json").read_text()))

    def packed(self) -> dict[str, str]:
        """Return the texts of the archive, by name."""
        return unpacked(self.work / "card-report.tar.gz")

    def calls(self) -> list[list[str]]:
        file = self.bin / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def linked(self) -> dict[str, Any]:
        """Return the result of the stage link once it has ended."""
        await_that(lambda: self.run("link") in (0, 1) and self.result("link")["status"] != "running")
        return self.result("link")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """A v++ that make calls. The variables by which the Makefile is told something do not change what is built."""
    tools = Tools(tmp_path)
    for name in ("XILINX_XRT", XCLBIN_VARIABLE, "MAKEFLAGS"):
        monkeypatch.delenv(name, raising=False)
    path = f"{tools.bin}:{Path(sys.executable).parent}:/usr/bin:/bin"
    for name, value in {"TARGET": "hw_emu", "OPTIMIZER": "rmsprop", "PATH": path}.items():
        monkeypatch.setenv(name, value)
    return tools


@pytest.fixture
def tools(made: Tools, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """A v++ that is called without make, which saves a second for each call."""

    def call(work: Path, target: str) -> list[str]:
        if target == "link":
            return ["v++", "--link", "--output", str(card_build.xclbin_in(work))]
        kernel = Path(target).stem
        return ["v++", "--kernel", kernel, "--temp_dir", str(work / "card/temp" / kernel), "--output", target]

    monkeypatch.setattr(card_build, "_make", call)
    return made


def unpacked(archive: Path) -> dict[str, str]:
    """Return the texts of an archive, by name."""
    with tarfile.open(archive) as packed:
        files = {name: packed.extractfile(name) for name in packed.getnames()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_the_smallest_kernel_comes_first_and_is_kept(made: Tools) -> None:
    """One kernel is compiled and its figures are set beside the expected ones. A second run compiles nothing.

    Stages run in their order, however they are named. The interval stands in csynth.xml alone: Vitis HLS tells the
    loops of processes where it tells of all modules.
    """
    for _ in range(2):
        assert made.run("csynth", "xo") == 0
    (call,) = made.calls()
    assert call[call.index("--kernel") + 1] == "sgd_update"
    figures = made.result("csynth")["figures"]
    assert {name: figure["reported"] for name, figure in figures.items()} == {
        "ii": 9, "bram": 45, "uram": 32, "ff": 7000, "lut": 60000, "dsp": 20,
    }  # fmt: skip
    assert figures["ii"] == {"reported": 9, "expected": 8, "loop": "compute/beats"}
    assert figures["uram"]["expected"] == 32
    packed = [*made.packed()]
    assert any(name.endswith("sgd_update_csynth.xml") for name in packed) and "card-report/logs/xo.log" in packed


def test_linking_runs_in_the_background(made: Tools) -> None:
    """No second link begins beside one that runs. One that failed or was killed is told, and a later run begins anew.

    The environment does not change what is built.
    """
    made.tell("hold-link")
    assert made.run("xo", "link") == 0 and made.result("link")["status"] == "running"
    await_that(lambda: (made.bin / "group").exists())
    assert made.run("link") == 0 and "again later" in made.result("link")["reason"]
    os.killpg(int((made.bin / "group").read_text()), signal.SIGKILL)
    await_that(lambda: made.run("link") == 1)
    assert "ended without an xclbin" in made.result("link")["reason"]
    assert sum("--link" in call for call in made.calls()) == 1
    made.tell("fail-link")
    made.tell("hold-link", wanted=False)
    failed = made.linked()
    assert failed["status"] == "failed" and "no link" in "".join(failed["output"])
    assert f"see {made.work}/link.log" in failed["reason"]
    made.tell("fail-link", wanted=False)
    assert made.linked()["status"] == "done" and card_build.xclbin_in(made.work).read_text() == "built"
    assert {call[call.index("--target") + 1] for call in made.calls()} == {"hw"}
    assert not any("rmsprop" in word for call in made.calls() for word in call)


@pytest.mark.parametrize(
    ("fault", "statuses", "told"),
    [
        ("compile", ["failed", "skipped", "skipped"], "see {work}/xo.log"),
        ("whole", ["failed", "skipped", "skipped"], "not whole"),
        ("csynth", ["done", "failed", "running"], "no csynth.xml"),
    ],
)
def test_it_stops_at_the_first_error_of_hls(tools: Tools, fault: str, statuses: list[str], told: str) -> None:
    """After a failed compilation nothing else is built; the next run goes on from there."""
    tools.tell(f"fail-{fault}")
    assert tools.run(*BUILD) == 1 and sum("--link" not in call for call in tools.calls()) == 1
    results = [tools.result(stage) for stage in BUILD]
    assert [result["status"] for result in results] == statuses
    failed = results[statuses.index("failed")]
    assert told.format(work=tools.work) in failed["reason"]
    assert fault != "compile" or "HLS 200-70" in "".join(failed["output"])
    assert fault == "csynth" or "xo has not succeeded" in results[2]["reason"]
    tools.tell(f"fail-{fault}", wanted=False)
    card_build.xo_in(tools.work).unlink(missing_ok=True)
    assert tools.run("xo", "csynth") == 0


def test_what_was_built_is_gone_or_out_of_date(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage whose file was deleted is no longer done.

    If sources change while a link runs, the xclbin is of the sources before, so that the run after it links again.
    """
    assert tools.run("xo") == 0 and tools.linked()["status"] == "done"
    tools.tell("hold-link")
    for built in (card_build.xo_in(tools.work), card_build.xclbin_in(tools.work)):
        built.unlink()
    assert tools.run("xo", "link") == 0 and card_build.xo_in(tools.work).exists()
    assert tools.result("link")["status"] == "running"
    inputs = card_report._Report.inputs
    monkeypatch.setattr(card_report._Report, "inputs", lambda report, stage: inputs(report, stage) | {"sources": 2**63})
    tools.tell("hold-link", wanted=False)
    assert tools.linked()["status"] == "done" and tools.result("link")["inputs"]["sources"] < 2**63
    assert tools.run("xo", "link") == 0 and tools.result("link")["status"] == "running"
    assert tools.linked()["inputs"]["sources"] == 2**63


def test_two_runs_in_one_folder(made: Tools, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one is refused, also where the first was killed and its v++ goes on alone.

    Ctrl-C ends a v++ that does not heed it, too: nothing goes on behind the command's back.
    """
    made.tell("hold-compile")
    made.tell("deaf-compile")
    run, compiler = made.start("xo"), made.pid("compile")
    assert made.run("xo") == 1
    run.send_signal(signal.SIGINT)
    _, told = run.communicate(timeout=LIMIT)
    assert run.returncode == 130 and "run the command again to go on" in told
    await_that(lambda: not Path(f"/proc/{compiler}").exists())
    (made.bin / "pid-compile").unlink()
    run, compiler = made.start("xo"), made.pid("compile")
    run.kill()
    run.communicate(timeout=LIMIT)
    assert made.run("xo") == 1
    told = capsys.readouterr().err
    assert told.count(f"works in {made.work}") == 2 and "fuser" in told and "--work" in told
    made.tell("hold-compile", wanted=False)
    await_that(lambda: not Path(f"/proc/{compiler}").exists() and made.run("xo") == 0)
    assert len(made.calls()) == 2


def test_a_skipped_stage_keeps_what_it_found(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in a shell without v++ leaves the figures of the run before, which stay in the archive."""
    assert tools.run("xo", "csynth") == 0
    with monkeypatch.context() as patched:
        patched.setattr(card_build, "unable", lambda work: "there is no v++ on PATH")
        patched.setattr(card_report._Report, "inputs", lambda report, stage: {"v++": None})
        assert tools.run("xo", "csynth") == 0
    assert json.loads(tools.packed()["card-report/csynth.json"])["figures"]
    assert tools.run("xo", "csynth") == 0 and len(tools.calls()) == 1


def test_what_is_skipped_says_why(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that need XRT, or the kernels' sources, name what is missing. A blank in a path would be two for make."""
    folder, tools.work = tools.work, tools.work.with_name("my work")
    assert tools.run("xo") == 0
    assert f"cannot build in {str(tools.work)!r}" in tools.result("xo")["reason"]
    tools.work = folder
    monkeypatch.setattr(card_build, "CHECKOUT", tools.work)
    monkeypatch.setattr(RUNTIME_OF, lambda system: Runtime(None, None, None, False))
    assert tools.run("driver", "selftest", "xo") == 0
    assert all("XILINX_XRT is not set" in tools.result(stage)["reason"] for stage in ("driver", "selftest"))
    assert "not in the installed package" in tools.result("xo")["reason"]


def test_which_xclbin_is_worked(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that is named, else the one that was linked, else that of the environment, as in training."""
    monkeypatch.setattr(RUNTIME_OF, lambda system: Runtime(tools.work, None, None, False))
    stages = ("selftest", "p2p", "train")
    assert tools.run(*stages) == 0
    assert all("there is no xclbin" in tools.result(stage)["reason"] for stage in stages)
    monkeypatch.setenv(XCLBIN_VARIABLE, "told.xclbin")

    def worked(*cards: str) -> str:
        assert tools.run(*stages, cards=cards) == 0
        assert all("no folders are named" in tools.result(stage)["reason"] for stage in stages)
        return str(tools.result("selftest")["inputs"]["xclbin"])

    assert worked() == "told.xclbin"
    assert tools.run("xo") == 0 and tools.linked()["status"] == "done"
    assert worked() == str(card_build.xclbin_in(tools.work))
    assert worked("--xclbin", "named.xclbin") == "named.xclbin"


def test_a_stage_that_fails_or_breaks(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Remedies of what a stage finds are shown, not only packed.

    Any other error fails its stage alone, and the report says where it came from.
    """

    def breaks(work: Path, lock: int) -> dict[str, Any]:
        raise ZeroDivisionError("of a new card")

    monkeypatch.setattr(RUNTIME_OF, lambda system: Runtime(tools.work, None, None, False))
    found = [Finding("card 0", "P2P", False, "disabled", "Run xbutil."), Finding("card 0", "run", False, "It failed.")]
    monkeypatch.setattr(examination, "examine", lambda *_: found)
    monkeypatch.setattr(card_build, "compile_smallest", breaks)
    assert tools.run("driver", "xo", "csynth") == 1
    told = "card 0, P2P: disabled. Run xbutil. card 0, run: It failed."
    assert tools.result("driver")["reason"] == told and told in capsys.readouterr().out
    broken = json.loads(tools.packed()["card-report/xo.json"])
    assert broken["reason"] == "ZeroDivisionError: of a new card" and "in breaks" in "".join(broken["output"])
    assert tools.result("csynth")["status"] == "skipped"


def test_an_archive_has_no_paths_of_the_machine(made: Tools, tmp_path: Path) -> None:
    """The archive has words in place of work folder, checkout, xclbin and storage folders."""
    made.tell("fail-compile")
    cards = (str(tmp_path / "a"), str(tmp_path / "b"), "--xclbin", str(tmp_path / "mine.xclbin"))
    assert made.run("xo", "selftest", cards=cards) == 1
    packed = "".join(made.packed().values())
    assert str(tmp_path) not in packed and str(REPOSITORY) not in packed
    assert all(word in packed for word in ("WORK/xo.log", "CHECKOUT/hls", '"FOLDER1"', '"XCLBIN"'))


def test_what_cannot_be_written(
    tools: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder and the option, or the archive, and leaves what was there."""
    tools.work.write_text("a file")
    assert tools.run("xo") == 1 and tools.work.read_text() == "a file"
    assert re.search(f"cannot be written to {tools.work}: File exists.*--work", capsys.readouterr().err, re.DOTALL)
    tools.work.unlink()
    assert tools.run("xo") == 0
    archive = tools.work / "card-report.tar.gz"
    before = archive.read_bytes()
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    assert tools.run("csynth") == 1 and "No space left on device" in capsys.readouterr().err
    assert archive.read_bytes() == before and not list(tools.work.glob("*.new"))


def test_logs_that_go_while_they_are_packed(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """v++, which may be linking, deletes logs and folders at any moment; the report is packed without them."""
    assert tools.run("xo") == 0
    (tools.work / "gone.log").symlink_to("nowhere")
    logs_in = card_build.logs_in
    monkeypatch.setattr(
        card_build, "logs_in", lambda work: logs_in(work) | {name: work / name for name in ("lost.log", "card/x.log")}
    )
    assert tools.run("csynth") == 0
    entries = tools.packed()
    assert entries["card-report/logs/lost.log"] == "cannot be read: No such file or directory"
    assert "card-report/logs/gone.log" not in entries and "card-report/logs/xo.log" in entries


def test_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One page tells what to install, and nothing is written."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(RUNTIME_OF, lambda system: Runtime(None, None, None, False))
    assert main(["card-report", "--work", str(tmp_path / "work")]) == 1
    told = capsys.readouterr().out
    wanted = ("XILINX_XRT is not set, and no v++", SMARTSSD.platform.shell, "--device ADDRESS --p2p enable")
    assert told == card_report._TO_INSTALL and len(told.splitlines()) < 40 and all(words in told for words in wanted)
    assert not (tmp_path / "work").exists()


def test_the_archive_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host, user, home, serial numbers and the named places are left out; PCI addresses stay.

    Vivado names folders by the host; a name in capitals, a domain, sudo and wide columns hide nothing.
    """
    monkeypatch.setattr(socket, "gethostname", lambda: "lab7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setenv("SUDO_USER", "eve")
    text = "ada@lab7: /home/ada/x /root/y lab7.example.org /srv/secret/z Serial Number: 12XYZ card 0000:42:00.1 adapter"
    log, more = tmp_path / "link.log", tmp_path / "x.log"
    log.write_bytes(b"first" + (1 << 20) * b"." + b"\xff\n" + text.encode())
    more.write_text("at LAB7, /data/eve/x .Xil/Vivado-12-lab7\nSerial Number          : 12XYZ")
    logs, places = {"link.log": log, ".Xil/Vivado-12-lab7/x.log": more}, {"/srv/secret": "FOLDER0"}
    report_archive.pack(tmp_path / "a.tar.gz", {"one": {"reason": [text]}}, logs=logs, places=places)
    entries = unpacked(tmp_path / "a.tar.gz")
    wanted = "USER@HOST: HOME/x HOME/y HOST FOLDER0/z Serial Number: SERIAL card 0000:42:00.1 adapter"
    assert json.loads(entries["card-report/one.json"])["reason"] == [wanted]
    packed_log = entries["card-report/logs/link.log"]
    assert packed_log.endswith("\N{REPLACEMENT CHARACTER}\n" + wanted) and "first" not in packed_log
    told = "at HOST, /data/USER/x .Xil/Vivado-12-HOST\nSerial Number          : SERIAL"
    assert entries["card-report/logs/.Xil/Vivado-12-HOST/x.log"] == told
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        assert {(entry.uname, entry.gname, entry.uid, entry.mtime) for entry in packed.getmembers()} == {("", "", 0, 0)}


def test_a_user_without_name_and_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers and services have such users; a home of / is not taken out of every path."""
    monkeypatch.setattr(getpass, "getuser", mock.Mock(side_effect=KeyError("getpwuid(): uid not found: 12345")))
    for home in ("/", "~"):
        monkeypatch.setattr(os.path, "expanduser", lambda path, home=home: home)
        assert report_archive.without_identity("/dev/xrt ~x", {"/": "FOLDER0"}) == "/dev/xrt ~x"
