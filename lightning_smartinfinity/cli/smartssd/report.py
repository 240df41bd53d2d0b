"""``smart-infinity card-report``: tests a new SmartSSD stage by stage, and packs the results into one archive."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from lightning_smartinfinity.cli.option_types import reading
from lightning_smartinfinity.cli.smartssd import build
from lightning_smartinfinity.cli.smartssd.archive import pack
from lightning_smartinfinity.cli.smartssd.options import add_cards, cards_of
from lightning_smartinfinity.errors import SmartInfinityError, StorageError, StorageLockedError
from lightning_smartinfinity.settings import SmartSSDConfig
from lightning_smartinfinity.settings.rules import Rule

__all__ = ["DESCRIPTION", "add_options", "run"]

DESCRIPTION = """\
Try a SmartSSD for the first time, and pack what is found into one archive without the machine's identity. The stages
are: driver, xo (compiles the smallest kernel), csynth (its resources beside those expected), selftest, p2p (rates by
size), train (twenty steps beside the host, and rates of its kernel by size) and link (in the background, for hours).
Run the command again to go on where it stopped. Exit status 1 if a stage failed.
"""
_P2P_MIB = (1, 4, 16, 64)
_STATUSES = ("done", "failed", "running", "skipped")
_TO_INSTALL = """\
There is nothing to try: XILINX_XRT is not set, and no v++ is on PATH. If XRT or Vitis is installed, only its settings
are missing: `source` them as below. To use a SmartSSD, install:
  1. XRT 2.13 or later with its driver xocl, then `source /opt/xilinx/xrt/setup.sh`. On Debian 12 see
     `smart-infinity selftest`.
  2. The shell of the card, xilinx_u2_gen3x4_xdma_gc_2_202110_1, and `xbutil configure --device ADDRESS --p2p enable`.
To build the kernels, with or without a card, install:
  3. Vitis, then source its settings64.sh. Add the development package of the shell.
  4. A checkout or source distribution of lightning-smartinfinity, installed with `pip install --editable`.
Then run `smart-infinity card-report FOLDER...` with a folder on the SSD of each card.
"""


@dataclass(frozen=True)
class _Report:
    """Stores the stages' results, and holds the stages' inputs.

    Args:
        work: Folder for results and builds.
        lock: Descriptor that locks the work folder.
        folders: Storage folders on the SSDs of the cards.
        settings: Settings, as for training.
        has_runtime: Whether XRT is installed.
    """

    work: Path
    lock: int
    folders: list[str]
    settings: SmartSSDConfig
    has_runtime: bool

    def last(self, stage: str) -> dict[str, Any]:
        """Return the stored result of a stage; empty if there is none, or if it is damaged."""
        try:
            last = json.loads(self._file(stage).read_text())
        except (OSError, ValueError):
            return {}
        whole = isinstance(last, dict) and last.get("status") in _STATUSES and isinstance(last.get("inputs"), dict)
        return last if whole else {}

    def keep(self, stage: str, result: dict[str, Any]) -> None:
        """Store the result of a stage."""
        unfinished = self._file(stage).with_suffix(".new")
        unfinished.write_text(json.dumps(result, indent=2))
        unfinished.replace(self._file(stage))

    def _file(self, stage: str) -> Path:
        return self.work / f"{stage}.json"

    def done(self, stage: str) -> bool:
        """Return whether a stage has succeeded with its present inputs."""
        if stage == "driver":  # it takes a second, and nothing records changes of the driver
            return False
        built = {"xo": build.xo_in, "link": build.xclbin_in}.get(stage)
        if built and not built(self.work).exists():
            return False
        last = self.last(stage)
        return last.get("status") == "done" and last.get("inputs") == self.inputs(stage)

    def inputs(self, stage: str) -> dict[str, Any]:
        """Return the inputs that a stage's result depends on."""
        if stage in ("xo", "csynth", "link"):
            sources = [path for path in (build.CHECKOUT / "hls").rglob("*") if path.suffix in (".py", ".hpp")]
            sources += (build.CHECKOUT / "lightning_smartinfinity").glob("common/update_rules.py")
            return {
                "v++": shutil.which("v++"),
                "sources": max((path.stat().st_mtime_ns for path in sources), default=0),
            }
        xclbin = self.settings.xclbin and Path(self.settings.xclbin)
        built = xclbin.stat().st_mtime_ns if xclbin and xclbin.exists() else None
        chosen = {"devices": self.settings.devices and list(self.settings.devices), "binding": self.settings.binding}
        return {"folders": self.folders, "xclbin": str(xclbin), "built": built, **chosen}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_cards(parser, xclbin_default="what the stage link built, else SMART_INFINITY_XCLBIN")
    parser.add_argument(
        "--work", type=_path, default="card_report", help="folder for results and builds (default: %(default)s)"
    )
    parser.add_argument("--stage", nargs="+", choices=_STAGES, default=list(_STAGES), help="run these stages alone")


_path = reading(lambda text: Path(text).resolve() if text else None, Rule("Name a folder", lambda value: bool(value)))


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from lightning_smartinfinity.devices.smartssd.discovery.runtime import runtime_of
    from lightning_smartinfinity.devices.smartssd.discovery.system import System

    has_runtime = runtime_of(System()).root is not None
    if not has_runtime and not shutil.which("v++"):
        print(_TO_INSTALL, end="")
        return 1
    try:
        options.work.mkdir(parents=True, exist_ok=True)
        with open(options.work / "report.lock", "a") as lock:
            _take(lock)
            return _report(options, lock.fileno(), has_runtime=has_runtime)
    except OSError as error:
        where = error.filename2 or error.filename or options.work
        raise StorageError(
            f"The report cannot be written to {where}: {error.strerror or error}.",
            "Make room there, or name another folder by --work.",
        ) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the command again to go on") from None


def _take(lock: IO[str]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StorageLockedError(
            f"Another card-report, or a v++ that one left behind, works in {Path(lock.name).parent}.",
            f"Wait for it, end it (`fuser {lock.name}` lists its processes), or name another folder by --work.",
        ) from None


def _report(options: argparse.Namespace, lock: int, *, has_runtime: bool) -> int:
    """Run the stages and pack their results; raises OSError if the work folder cannot be written."""
    from lightning_smartinfinity.settings.smartssd import XCLBIN_VARIABLE

    work: Path = options.work
    built = build.xclbin_in(work)
    xclbin = str(built) if built.exists() else os.environ.get(XCLBIN_VARIABLE) or None
    settings = cards_of(options, xclbin=xclbin)
    report = _Report(work, lock, [str(Path(folder).resolve()) for folder in options.folders], settings, has_runtime)
    failed = False
    for stage in (stage for stage in _STAGES if stage in options.stage):
        result = _result_of(report, stage)
        print(f"{stage:<10}{result['status']:<9}{result.get('reason', '')}".rstrip(), flush=True)
        failed |= result["status"] == "failed"
    archive = work / "card-report.tar.gz"
    places = {folder: f"FOLDER{number}" for number, folder in enumerate(report.folders)}
    places |= {str(work): "WORK", str(build.CHECKOUT): "CHECKOUT"}
    if settings.xclbin:
        places |= dict.fromkeys((str(settings.xclbin), str(Path(settings.xclbin).resolve())), "XCLBIN")
    results = {stage: last for stage in _STAGES if (last := report.last(stage))}
    pack(archive, results, logs=build.logs_in(work), places=places)
    print(f"\nPacked {archive}. Read it before you send it.")
    return int(failed)


def _result_of(report: _Report, stage: str) -> dict[str, Any]:
    """Return the stored result of a stage that has succeeded, or run the stage and store its result."""
    if report.done(stage):
        return report.last(stage) | {"reason": "kept from an earlier run"}
    run, reason_to_skip = _STAGES[stage]
    last = report.last(stage)
    # A background stage depends on its inputs at its start, and is not skipped even if something is missing now.
    runs = last.get("status") == "running"
    inputs = last["inputs"] if runs else report.inputs(stage)
    try:
        reason = "" if runs else reason_to_skip(report)
        result: dict[str, Any] = {"status": "skipped", "reason": reason} if reason else run(report)
    except SmartInfinityError as error:
        result = {"status": "failed", "reason": str(error)}
    except Exception as error:  # the report exists to show unexpected errors of a new card
        told = traceback.format_exc().splitlines()
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}", "output": told}
    result["inputs"] = inputs
    if result["status"] != "skipped" or last.get("status", "skipped") == "skipped":  # a run found more
        report.keep(stage, result)
    return result


def _driver(report: _Report) -> dict[str, Any]:
    """Check XRT and the cards; on a new card there is no xclbin yet."""
    return _examined(report, [], without=("xclbin", "folders"))


def _examined(report: _Report, folders: list[str], *, without: Collection[str] = ()) -> dict[str, Any]:
    from lightning_smartinfinity.devices.smartssd.discovery.system import System
    from lightning_smartinfinity.devices.smartssd.examination import examine

    found = [each for each in examine(folders, report.settings, System()) if each.subject not in without]
    findings = [asdict(finding) for finding in found]
    wrong = [finding for finding in found if finding.ok is False]
    if wrong:
        told = (f"{one.subject}, {one.name}: {one.value.removesuffix('.')}. {one.remedy}".rstrip() for one in wrong)
        return {"status": "failed", "reason": " ".join(told), "findings": findings}
    return {"status": "done", "findings": findings}


def _p2p_rates(report: _Report) -> dict[str, Any]:
    """Measure each card's P2P rates in both directions by size; each transfer also checks the bytes.

    The result includes rates measured before a card failed, and the rates of other cards.
    """
    from lightning_smartinfinity.devices.smartssd.discovery.card_setup import find_cards
    from lightning_smartinfinity.devices.smartssd.discovery.system import System
    from lightning_smartinfinity.devices.smartssd.scratch import scratch_folder
    from lightning_smartinfinity.devices.smartssd.self_test import check_p2p

    folders = [Path(folder) for folder in report.folders]
    setup = find_cards(folders, report.settings, System())
    rates, failures = [], []
    for card, folder in zip(setup.cards, folders, strict=True):
        try:
            with scratch_folder(card, folder) as scratch:
                for mib in _P2P_MIB:
                    moved = check_p2p(setup, card, scratch, nbytes=mib << 20)
                    rates.append({"card": card.label, "nbytes": mib << 20, "read": moved.read, "write": moved.write})
        except SmartInfinityError as error:
            failures.append(str(error))
    if failures:
        return {"status": "failed", "reason": " ".join(failures), "bytes_per_second": rates}
    return {"status": "done", "bytes_per_second": rates}


def _trained(report: _Report) -> dict[str, Any]:
    """Train with the xclbin's first kernel, on the cards and on the host."""
    from lightning_smartinfinity.cli.smartssd.training import compare_trainings
    from lightning_smartinfinity.devices.smartssd.discovery.system import System
    from lightning_smartinfinity.devices.smartssd.discovery.xclbin import read_xclbin
    from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
    from lightning_smartinfinity.settings.smartssd import BUILD_REMEDY

    built = read_xclbin(report.settings, System()).kernels
    kernel = next((each for each in KERNELS if each.name in built), None)
    if kernel is None:
        return {
            "status": "failed",
            "reason": f"the xclbin has none of our kernels, but {', '.join(built)}. {BUILD_REMEDY}",
        }
    return compare_trainings(report.folders, report.settings, optimizer=kernel.rule.optimizers[-1])


def _without_runtime(report: _Report) -> str:
    return "" if report.has_runtime else "XILINX_XRT is not set: install XRT, or source its setup.sh"


def _without_work(report: _Report) -> str:
    if reason := _without_runtime(report):
        return reason
    if not report.settings.xclbin:
        return "there is no xclbin: pass --xclbin, set SMART_INFINITY_XCLBIN, or run the stage link until it is done"
    return "" if report.folders else "no folders are named: name one on the SSD of each card"


def _without_xo(report: _Report) -> str:
    return build.unable(report.work) or ("" if report.done("xo") else "the stage xo has not succeeded")


_STAGES: dict[str, tuple[Callable[[_Report], dict[str, Any]], Callable[[_Report], str]]] = {
    "driver": (_driver, _without_runtime),
    "xo": (
        lambda report: build.compile_smallest(report.work, report.lock),
        lambda report: build.unable(report.work),
    ),
    "csynth": (lambda report: build.compare_csynth(report.work), _without_xo),
    "selftest": (lambda report: _examined(report, report.folders), _without_work),
    "p2p": (_p2p_rates, _without_work),
    "train": (_trained, _without_work),
    "link": (
        lambda report: build.link(report.work, begun=report.last("link").get("status") == "running"),
        _without_xo,
    ),
}
"""Each stage: the function that runs it, and the function that returns why to skip it (empty: do not skip)."""
