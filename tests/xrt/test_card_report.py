"""``smart-infinity card-report`` on emulated cards."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.smartssd import training as card_training
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from tests.helpers.runif import RunIf
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)


def packed(archive: Path) -> dict[str, Any]:
    with tarfile.open(archive) as opened:
        files = {Path(name).stem: opened.extractfile(name) for name in opened.getnames() if name.endswith(".json")}
        return {name: json.load(file) for name, file in files.items() if file is not None}


def test_figures_match_the_counters(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive has each kernel that each card ran, and a rate for each card and size. A second run works no card.

    The whole command then does what is left, and skips what takes v++.
    """
    folders = [str(tmp_path / name) for name in "ab"]
    command = ["card-report", *folders, "--xclbin", str(emulated_cards.build.xclbin), "--work", str(tmp_path / "work")]
    assert main([*command, "--stage", "p2p"]) == 0
    assert [emulated_cards.counter("peak_bytes", card) for card in range(2)] == [64 << 20] * 2
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
    monkeypatch.setattr(card_training, "_WIDTHS", (256,))
    assert main(command[: command.index("--stage")]) == 0
    whole = packed(tmp_path / "work/card-report.tar.gz")
    assert {stage: found["status"] for stage, found in whole.items()} == {
        **dict.fromkeys(("driver", "selftest", "p2p", "train"), "done"),
        **dict.fromkeys(("xo", "csynth", "link"), "skipped"),
    }
    assert whole["selftest"] == report["selftest"] and whole["p2p"] == report["p2p"]


def test_a_card_that_fails_fails_its_stage(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A wrong result is told, packed and tried again by the next run."""
    emulated_cards.inject("corrupt", card=0, skipped=1, pointer=1, bit=64 * 32)
    command = ["card-report", str(tmp_path / "a"), "--xclbin", str(emulated_cards.build.xclbin)]
    command += ["--work", str(tmp_path / "work"), "--stage", "selftest"]
    assert main(command) == 1
    assert packed(tmp_path / "work/card-report.tar.gz")["selftest"]["status"] == "failed"
    emulated_cards.reset()
    assert main(command) == 0


def test_p2p_that_fails_at_one_size(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The card's smaller sizes and the other card's rates are kept."""
    emulated_cards.inject("alloc", card=0, skipped=2)
    command = ["card-report", str(tmp_path / "a"), str(tmp_path / "b"), "--work", str(tmp_path / "work")]
    assert main([*command, "--xclbin", str(emulated_cards.build.xclbin), "--stage", "p2p"]) == 1
    found = packed(tmp_path / "work/card-report.tar.gz")["p2p"]
    assert found["status"] == "failed" and "The emulated card 0: " in found["reason"]
    assert [rate["nbytes"] >> 20 for rate in found["bytes_per_second"]] == [1, 4, 1, 4, 16, 64]


def test_a_card_that_fails_in_training(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host finishes the step with the same bits; the stage fails all the same, and says why the host had to."""
    monkeypatch.setattr(card_training, "_WIDTHS", (256,))
    emulated_cards.inject("error", card=0, skipped=9 + 5)  # after the runs of the self-test
    command = ["card-report", str(tmp_path / "a"), "--work", str(tmp_path / "work"), "--stage", "train"]
    command += ["--xclbin", str(emulated_cards.build.xclbin)]
    assert main(command) == 1
    found = packed(tmp_path / "work/card-report.tar.gz")["train"]
    assert found["reason"].startswith("The emulated card 0 failed: ") and "ERROR" in found["reason"]
    assert "The host updates" in found["reason"] and found["elements_per_second"]
    assert main(command) == 0


def test_trainings_are_compared_with_the_host(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps give the host's bits and a rate for each size; the stage fails where one bit is another."""
    command = ["card-report", str(tmp_path / "a"), str(tmp_path / "b"), "--work", str(tmp_path / "work")]
    command += ["--xclbin", str(emulated_cards.build.xclbin), "--stage", "train"]
    compared: list[dict[str, Any]] = []
    rates: list[float] = []

    def trained(*arguments: Any) -> tuple[dict[str, Any], Any]:
        arrays, traffic = train(*arguments)
        compared.append(arrays)
        rates.append(traffic.numel / max(traffic.kernel_seconds, 1e-9))
        if len(compared) == 7:  # the first training of the second run, on the cards
            arrays["master"].view("u1")[12345] ^= 1
        return arrays, traffic

    train = card_training._trained
    monkeypatch.setattr(card_training, "_trained", trained)
    assert main(command) == 0
    found = packed(tmp_path / "work/card-report.tar.gz")["train"]
    assert [rate["numel"] for rate in found["elements_per_second"]] == [256**2, 1024**2, 2048**2]
    assert [rate["rate"] for rate in found["elements_per_second"]] == rates[::2] and found["steps"] == 20
    assert all(0 < rate < 1e9 for rate in rates[::2])  # on the host no kernel runs
    assert len(compared) == 6 and all(array.any() for arrays in compared for array in arrays.values())
    assert sum(emulated_cards.counter("runs_completed", card) for card in range(2)) >= 3 * 20
    (tmp_path / "work/train.json").unlink()
    assert main(command) == 1
    reason = packed(tmp_path / "work/card-report.tar.gz")["train"]["reason"]
    assert "differs from the host's: master of 65536 elements" in reason
    assert [path for name in "ab" for path in (tmp_path / name).rglob("*") if path.is_file()] == []


def test_a_training_that_is_interrupted(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C leaves state that the next run removes, as after a kill, and the message says that one can go on."""
    command = ["card-report", str(tmp_path / "a"), "--work", str(tmp_path / "work")]
    command += ["--xclbin", str(emulated_cards.build.xclbin), "--stage", "train"]
    monkeypatch.setattr(card_training, "_WIDTHS", (256,))

    def interrupted(layer: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise KeyboardInterrupt
        return step(layer, batch, batch_idx)

    step = card_training._Layer.training_step

    with monkeypatch.context() as patched:
        patched.setattr(card_training._Layer, "training_step", interrupted)
        assert main(command) == 130
    assert "run the command again to go on" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["smart-infinity-card-report"]
    assert main(command) == 0
    assert [path for path in (tmp_path / "a").rglob("*") if path.is_file()] == []
