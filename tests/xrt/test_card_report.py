"""``smart-infinity card-report`` on emulated cards."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.smartssd import report as card_report
from lightning_smartinfinity.cli.smartssd import training as card_training
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from tests.helpers.runif import RunIf
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)


class Report:
    """Runs the command on emulated cards beside two folders, and reads its archive."""

    def __init__(self, folder: Path, cards: EmulatedCards) -> None:
        self.folders, self.work, self._xclbin = [folder / "a", folder / "b"], folder / "work", cards.build.xclbin

    def run(self, *stages: str, folders: int = 2) -> int:
        command = ["card-report", *map(str, self.folders[:folders]), "--work", str(self.work)]
        command += ["--xclbin", str(self._xclbin), *(["--stage", *stages] if stages else [])]
        return main(command)

    def packed(self) -> dict[str, Any]:
        with tarfile.open(self.work / "card-report.tar.gz") as opened:
            files = {Path(name).stem: opened.extractfile(name) for name in opened.getnames() if name.endswith(".json")}
            return {name: json.load(file) for name, file in files.items() if file is not None}

    def left(self) -> list[Path]:
        """Return the files in the folders of state."""
        return [path for folder in self.folders for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def report(tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> Report:
    """A report whose trainings and transfers are few and small."""
    monkeypatch.setattr(card_report, "_P2P_MIB", (1, 2, 4))
    monkeypatch.setattr(card_training, "_WIDTHS", (256,))
    return Report(tmp_path, emulated_cards)


def test_figures_match_the_counters(report: Report, emulated_cards: EmulatedCards) -> None:
    """The archive has each kernel that each card ran, and a rate for each card and size. A second run works no card.

    The whole command then does what is left, and skips what takes v++.
    """
    assert report.run("p2p") == 0
    assert [emulated_cards.counter("peak_bytes", card) for card in range(2)] == [4 << 20] * 2
    assert report.run("driver", "selftest", "p2p") == 0
    found = report.packed()
    names = [finding["name"] for finding in found["selftest"]["findings"]]
    runs = [emulated_cards.counter("runs_completed", card) for card in range(2)]
    assert runs == [9 * sum(names.count(kernel.name) for kernel in KERNELS) // 2] * 2 and runs[0] > 0
    rates = found["p2p"]["bytes_per_second"]
    assert [rate["nbytes"] >> 20 for rate in rates] == [1, 2, 4] * 2
    assert all(rate["read"] > 0 and rate["write"] > 0 for rate in rates)
    assert str(report.folders[0].parent) not in json.dumps(found)
    assert report.run("driver", "selftest", "p2p") == 0
    assert [emulated_cards.counter("runs_completed", card) for card in range(2)] == runs
    assert report.run() == 0
    whole = report.packed()
    assert {stage: result["status"] for stage, result in whole.items()} == {
        **dict.fromkeys(("driver", "selftest", "p2p", "train"), "done"),
        **dict.fromkeys(("xo", "csynth", "link"), "skipped"),
    }
    assert whole["selftest"] == found["selftest"] and whole["p2p"] == found["p2p"]


def test_p2p_that_fails_at_one_size(report: Report, emulated_cards: EmulatedCards) -> None:
    """The card's smaller sizes and the other card's rates are kept."""
    emulated_cards.inject("alloc", card=0, skipped=2)
    assert report.run("p2p") == 1
    found = report.packed()["p2p"]
    assert found["status"] == "failed" and "The emulated card 0: " in found["reason"]
    assert [rate["nbytes"] >> 20 for rate in found["bytes_per_second"]] == [1, 2, 1, 2, 4]


def test_a_card_that_fails_in_training(report: Report, emulated_cards: EmulatedCards) -> None:
    """The host finishes the step with the same bits; the stage fails all the same, and says why the host had to."""
    emulated_cards.inject("error", card=0, skipped=9 + 5)  # after the runs of the self-test
    assert report.run("train", folders=1) == 1
    found = report.packed()["train"]
    assert found["reason"].startswith("The emulated card 0 failed: ") and "ERROR" in found["reason"]
    assert "The host updates" in found["reason"] and found["elements_per_second"]


def test_trainings_are_compared_with_the_host(
    report: Report, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps give the host's bits and a rate for each size; the stage fails where one bit is another."""
    compared: list[dict[str, Any]] = []
    rates: list[float] = []

    def trained(*arguments: Any) -> tuple[dict[str, Any], Any]:
        arrays, traffic = train(*arguments)
        compared.append(arrays)
        rates.append(traffic.numel / max(traffic.kernel_seconds, 1e-9))
        if len(compared) == 5:  # that of the second run, on the cards
            arrays["master"].view("u1")[12345] ^= 1
        return arrays, traffic

    train = card_training._trained
    monkeypatch.setattr(card_training, "_trained", trained)
    monkeypatch.setattr(card_training, "_WIDTHS", (256, 512))
    assert report.run("train") == 0
    found = report.packed()["train"]
    assert [rate["numel"] for rate in found["elements_per_second"]] == [256**2, 512**2]
    assert [rate["rate"] for rate in found["elements_per_second"]] == rates[::2] and found["steps"] == 20
    assert all(0 < rate < 1e9 for rate in rates[::2])  # on the host no kernel runs
    assert len(compared) == 4 and all(array.any() for arrays in compared for array in arrays.values())
    assert sum(emulated_cards.counter("runs_completed", card) for card in range(2)) >= 2 * 20
    (report.work / "train.json").unlink()
    monkeypatch.setattr(card_training, "_WIDTHS", (256,))
    assert report.run("train") == 1
    assert "differs from the host's: master of 65536 elements" in report.packed()["train"]["reason"]
    assert report.left() == []


def test_a_training_that_is_interrupted(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C leaves state that the next run removes, as after a kill, and the message says that one can go on."""

    def interrupted(layer: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise KeyboardInterrupt
        return step(layer, batch, batch_idx)

    step = card_training._Layer.training_step
    with monkeypatch.context() as patched:
        patched.setattr(card_training._Layer, "training_step", interrupted)
        assert report.run("train", folders=1) == 130
    assert "run the command again to go on" in capsys.readouterr().err
    assert [path.name for path in report.folders[0].iterdir()] == ["smart-infinity-card-report"]
    assert report.run("train", folders=1) == 0
    assert report.left() == []
