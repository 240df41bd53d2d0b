"""``smart-infinity card-report`` on emulated cards."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from tests.helpers.runif import RunIf
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)


def packed(archive: Path) -> dict[str, Any]:
    with tarfile.open(archive) as opened:
        files = {Path(name).stem: opened.extractfile(name) for name in opened.getnames()}
        return {name: json.load(file) for name, file in files.items() if file is not None}


def test_figures_match_the_counters(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The archive has each kernel that each card ran, and a rate for each card and size. A second run works no card."""
    folders = [str(tmp_path / name) for name in "ab"]
    command = ["card-report", *folders, "--xclbin", str(emulated_cards.build.xclbin), "--work", str(tmp_path / "work")]
    command += ["--stage", "driver", "selftest", "p2p"]
    assert main(command) == 0
    report = packed(tmp_path / "work/card-report.tar.gz")
    names = [found["name"] for found in report["selftest"]["findings"]]
    runs = [emulated_cards.counter("runs_completed", card) for card in range(2)]
    assert runs == [9 * sum(names.count(kernel.name) for kernel in KERNELS) // 2] * 2 and runs[0] > 0
    rates = report["p2p"]["bytes_per_second"]
    assert [rate["nbytes"] >> 20 for rate in rates] == [1, 4, 16, 64] * 2
    assert all(rate["read"] > 0 and rate["write"] > 0 for rate in rates)
    assert str(tmp_path) not in json.dumps(report)
    assert main(command) == 0
    assert [emulated_cards.counter("runs_completed", card) for card in range(2)] == runs


def test_a_card_that_fails_fails_its_stage(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A wrong result is told, packed and tried again by the next run."""
    emulated_cards.inject("corrupt", card=0, skipped=1, pointer=1, bit=64 * 32)
    command = ["card-report", str(tmp_path / "a"), "--xclbin", str(emulated_cards.build.xclbin)]
    command += ["--work", str(tmp_path / "work"), "--stage", "selftest"]
    assert main(command) == 1
    assert packed(tmp_path / "work/card-report.tar.gz")["selftest"]["status"] == "failed"
    emulated_cards.reset()
    assert main(command) == 0
