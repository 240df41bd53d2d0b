"""Tests what a card has to pass before it gets state, which cards are chosen, and the commands that test a card.

Processes do not share emulated cards: what another rank reports is made up.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hls.description import design_for
from hls.xclbin import xclbin
from lightning_smartinfinity import (
    ConfigError,
    DeviceError,
    SmartInfinityError,
    SmartSSDConfig,
    StorageError,
    TransferConfig,
    native,
)
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.cli.smartssd import report as card_report
from lightning_smartinfinity.cli.smartssd import training as card_training
from lightning_smartinfinity.devices.smartssd import CardSetup, find_cards, self_test, unreturned
from lightning_smartinfinity.devices.smartssd.discovery.runtime import Runtime, require_runtime
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from lightning_smartinfinity.settings import CARD_TASKLET_BYTES, HOST_TASKLET_BYTES
from lightning_smartinfinity.settings.smartssd import XCLBIN_VARIABLE
from lightning_smartinfinity.zero3.ranks import collectives
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup import update_device
from lightning_smartinfinity.zero3.setup.update_device import choose_update_device
from tests.cli.conftest import Cli
from tests.helpers import native_testing as testing
from tests.helpers.card_runs import OPTIMIZERS, beside_host, setup_of
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that, lenient
from tests.helpers.xrt import VERSION
from tests.pipeline.harness import Case
from tests.smartssd.test_card_report import unpacked
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)


@pytest.mark.parametrize(
    ("kernel", "pointer", "bit", "number", "words"),
    [
        (0, "status", 32, 0, "version"),
        (1, "parameter", 64 * 32, 0, "parameters arrived"),
        *((kernel, "master", 64 * 32, 0, "other bits") for kernel in range(len(KERNELS))),
        *(
            (0, "master", 64 * 32, number, rf"other bits than the host \(gradients and parameters in {dtype}\)")
            for number, dtype in enumerate(("float32", "bfloat16", "float16"))
        ),
    ],
)
def test_a_card_that_computes_something_else(
    tmp_path: Path, emulated_cards: EmulatedCards, kernel: int, pointer: str, bit: int, number: int, words: str
) -> None:
    """A wrong interface version, wrong parameters and wrong state are all reported, of every kernel and type."""
    chosen = KERNELS[kernel]
    pointers = {"status": 2 * chosen.num_arrays + 2, "parameter": 2 * chosen.num_arrays + 1, "master": 1}
    # Of the runs of each type, the second one updates.
    emulated_cards.inject("corrupt", card=1, skipped=3 * number + 1, pointer=pointers[pointer], bit=bit)
    with pytest.raises(DeviceError, match=words):
        self_test(setup_of(2, emulated_cards.build.xclbin), [tmp_path, tmp_path], [chosen])
    assert list(tmp_path.iterdir()) == []


def test_a_card_whose_run_fails_or_has_not_returned(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The error tells how the run ended, on which card and with which folder.

    The next test of a card whose run was given up fails at once, until the run returns.
    """
    emulated_cards.reset(count=6)
    deadline = lenient()
    setup = setup_of(1, emulated_cards.build.xclbin, first=5, timeout=deadline)
    late, out = f"did not return within {1000 * deadline:.0f} ms", "has not returned from a run or transfer"
    for fault, words in (
        ("error", "ERROR"),
        ("hang", late),
        (None, f"emulated card 5 {out} that this process abandoned"),
    ):
        if fault:
            emulated_cards.inject(fault, card=5)
        begun = emulated_cards.counter("runs_begun", 5)
        with pytest.raises(DeviceError, match=words) as failed:
            self_test(setup, [tmp_path / "a"], KERNELS[:1])
        assert (emulated_cards.counter("runs_begun", 5) > begun) == bool(fault)
        assert (f"emulated card 5 in {str(tmp_path / 'a')!r}" in str(failed.value)) == bool(fault)
        assert ".smart-infinity-" not in str(failed.value)
    emulated_cards.release(5)
    emulated_cards.wait_for("run-end", card=5, count=2)
    self_test(replace(setup, settings=SmartSSDConfig(xclbin=emulated_cards.build.xclbin)), [tmp_path], KERNELS[:1])


@pytest.mark.parametrize(("where", "verb"), [("read_at", "reading"), ("write_at", "writing")])
def test_p2p_that_does_not_return(tmp_path: Path, emulated_cards: EmulatedCards, where: str, verb: str) -> None:
    """A late transfer is given up and keeps the card's memory until it returns; then the card can be used again."""
    before, holds = emulated_cards.counter("num_buffers"), []
    setup = setup_of(1, emulated_cards.build.xclbin, timeout=lenient())
    told = rf"P2P between the emulated card 0 and its SSD failed: {verb} 1048576 bytes .*within \d+ ms.*kernel log"

    queue_of = native.CardBuffer.queue

    def held(buffer: native.CardBuffer, *, timeout_ms: int) -> native.FileQueue:
        queue = queue_of(buffer, timeout_ms=timeout_ms)
        holds.append(testing.Hold(queue, **{where: 0}))
        return queue

    with mock.patch.object(native.CardBuffer, "queue", held), pytest.raises(DeviceError, match=told):
        self_test(setup, [tmp_path], KERNELS[:1])
    assert list(tmp_path.iterdir()) == [] and emulated_cards.counter("num_buffers") == before + 1
    with pytest.raises(DeviceError, match="has not returned from a run or transfer that this process abandoned"):
        self_test(setup, [tmp_path], KERNELS[:1])
    holds[0].release()
    await_that(unreturned.close_returned)
    assert emulated_cards.counter("num_buffers") == before
    self_test(replace(setup, settings=SmartSSDConfig(xclbin=emulated_cards.build.xclbin)), [tmp_path], KERNELS[:1])


def test_an_ssd_that_fails(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """An error of the SSD names the card and the storage folder."""

    def submit(pipeline: native.Pipeline, batch: native.Batch) -> None:
        testing.inject(pipeline, fail_read_at=0, errno=errno.EIO)
        real(pipeline, batch)

    real = native.Pipeline.submit
    with mock.patch.object(native.Pipeline, "submit", submit), pytest.raises(StorageError, match="health") as failed:
        self_test(setup_of(1, emulated_cards.build.xclbin), [tmp_path], KERNELS[:1])
    told = str(failed.value)
    assert f"emulated card 0 in {str(tmp_path)!r}" in told and ".smart-infinity-" not in told


# ---- smart-infinity selftest


def test_command_on_emulated_cards(tmp_path: Path, emulated_cards: EmulatedCards, cli: Cli) -> None:
    """The command shows pairs, P2P with its speed and a test of every kernel, exits with 0 and leaves nothing.

    Every card runs every kernel thrice for each type. Folders need not exist.
    """
    folders = [tmp_path / "a/not/yet", tmp_path / "b"]
    arguments = ["selftest", "--mib", "2", "--xclbin", emulated_cards.build.xclbin, *folders]
    shown = cli(*arguments).out
    assert [emulated_cards.counter("runs_completed", card) for card in range(2)] == [9 * len(KERNELS)] * 2
    told = ("Everything that was tried is ok.", "2 MiB written back unchanged", "GB/s from the SSD")
    assert all(words in shown for words in told) and "FAIL" not in shown
    assert re.search(rf"version +{re.escape(VERSION)}\.", shown)
    assert shown.count("one tasklet, bit for bit as on the host") == 2 * len(KERNELS)
    content = json.loads(cli(*arguments, "--json", "--devices", "1", "0").out)
    pairs = {finding["subject"]: finding["value"] for finding in content["findings"] if finding["name"] == "card"}
    assert content["ok"] and pairs == {str(folders[0]): "emulated card 1", str(folders[1]): "emulated card 0"}
    assert list(tmp_path.iterdir()) == []


def test_command_on_a_card_that_fails(tmp_path: Path, emulated_cards: EmulatedCards, cli: Cli) -> None:
    """One finding fails and says what to do, the others are made all the same, and the exit status is 1."""
    emulated_cards.inject("error", skipped=9)
    lines = cli("selftest", "--mib", "1", "--xclbin", emulated_cards.build.xclbin, tmp_path, status=1).out.splitlines()
    (failed,) = (number for number, line in enumerate(lines) if line.startswith("  FAIL"))
    assert "adagrad_update" in lines[failed] and "ERROR" in lines[failed]
    assert lines[failed + 1].startswith("        -> ") and "sgd_update" in lines[failed + 2]
    assert lines[-1].startswith("1 of ")


def test_debians_xrt_works_as_the_remedy_says(tmp_path: Path) -> None:
    """The commands after the installation let XRT find its driver, which it does not without them."""
    with pytest.raises(DeviceError) as refused:
        require_runtime(Runtime(None, None, None, False))
    commands = refused.value.remedy.partition("apt-get install libxrt1 && ")[2]
    load = "import ctypes; xrt = ctypes.CDLL('libxrt_coreutil.so.2'); print('opened', bool(xrt.xrtDeviceOpen(0)))"
    python = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(load)}"
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "XCL_EMULATION_MODE": "noop"}
    for script, opens in ((f"{commands} && {python}", True), (python, False)):
        ended = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True)
        assert ("opened True" in ended.stdout) == opens, ended.stderr


# ---- smart-infinity card-report


class Report:
    """Runs the command on emulated cards beside two folders, and reads its archive."""

    def __init__(self, folder: Path, cards: EmulatedCards) -> None:
        self.folders, self.work, self._xclbin = [folder / "a", folder / "b"], folder / "work", cards.build.xclbin

    def run(self, *stages: str, folders: int = 2) -> int:
        command = ["card-report", *map(str, self.folders[:folders]), "--work", str(self.work)]
        command += ["--xclbin", str(self._xclbin), *(["--stage", *stages] if stages else [])]
        return main(command)

    def packed(self) -> dict[str, Any]:
        files = unpacked(self.work / "card-report.tar.gz")
        return {Path(name).stem: json.loads(text) for name, text in files.items() if name.endswith(".json")}

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
    assert [rate["nbytes"] >> 20 for rate in rates if min(rate["read"], rate["write"]) > 0] == [1, 2, 4] * 2
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
    assert re.match("The emulated card 0 failed: .*ERROR.*The host updates", found["reason"], re.DOTALL)
    assert found["elements_per_second"]


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
    told = [(rate["numel"], rate["rate"]) for rate in found["elements_per_second"]]
    assert told == [(256**2, rates[0]), (512**2, rates[2])] and found["steps"] == 20
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


# ---- which device updates: cards are chosen where all ranks can use them, and the reason is told where they cannot


Gather = Callable[[Any, Any], list[Any]]


def alone(value: Any, group: Any) -> list[Any]:
    return [value]


def beside(monkeypatch: pytest.MonkeyPatch, gathered: Gather, raised: Gather = alone) -> None:
    """Let the ranks report what this function makes of what this one does, and raise what that function makes of it."""
    monkeypatch.setattr(update_device, "gather", gathered)
    monkeypatch.setattr(collectives, "gather", raised)


def another(**changes: Any) -> Gather:
    """Return a function that lets another rank report what this one does, with changes."""
    return lambda value, group: [value, value._replace(**changes) if changes else value]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group, unless a test says otherwise."""
    monkeypatch.delenv(XCLBIN_VARIABLE, raising=False)
    beside(monkeypatch, alone)


class Choosing:
    """Chooses a device for the storage folders of a test."""

    def __init__(self, folder: Path, cards: EmulatedCards) -> None:
        self.folder, self.build = folder, cards.build

    def settings(self, wanted: str, **settings: Any) -> OffloadSettings:
        # A trial of memory fills all of it: tasklets are the smallest without a warning.
        usual = {
            "storage": (self.folder / "a", self.folder / "b"),
            "transfer": TransferConfig(num_buffers=2, tasklet_bytes=16 << 20),
            "smartssd": SmartSSDConfig(xclbin=self.build.xclbin),
        }
        return OffloadSettings(update_device=wanted, **{**usual, **settings})

    def __call__(self, wanted: str = "auto", *, optimizer: str = "Adam", **settings: Any) -> CardSetup | None:
        return choose_update_device(self.settings(wanted, **settings), optimizer=optimizer).cards


@pytest.fixture
def choose(tmp_path: Path, emulated_cards: EmulatedCards) -> Choosing:
    return Choosing(tmp_path, emulated_cards)


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_cards_are_chosen(choose: Choosing, wanted: str) -> None:
    """Cards are chosen where they can be used; tasklets are then large unless the user says otherwise."""
    chosen = choose_update_device(choose.settings(wanted, transfer=TransferConfig(num_buffers=2)), optimizer="SGD")
    assert chosen.cards is not None and len(chosen.cards.cards) == 2
    assert chosen.tasklet_bytes == CARD_TASKLET_BYTES >= 16 << 20
    assert replace(chosen, cards=None).tasklet_bytes == HOST_TASKLET_BYTES
    asked = choose.settings(wanted, transfer=TransferConfig(tasklet_bytes=1 << 20, dram_cache_bytes="auto"))
    with (
        pytest.warns(UserWarning, match=r"tasklet_bytes=1048576\) is small for SmartSSDs"),
        pytest.warns(UserWarning, match=r"dram_cache_bytes='auto'\) is ignored"),
    ):
        assert choose_update_device(asked, optimizer="SGD").tasklet_bytes == 1 << 20


def test_an_xclbin_with_the_kernel_of_rmsprop_alone(choose: Choosing, emulated_cards: EmulatedCards) -> None:
    """Cards that have no other kernel pass the self-test, are chosen, and update as the host does."""
    path = choose.folder / "rmsprop.xclbin"
    path.write_bytes(xclbin(design_for("rmsprop")))
    emulated_cards.reset(count=12)
    chosen = choose(optimizer="RMSprop", smartssd=SmartSSDConfig(xclbin=path, devices=[10, 11]))
    assert chosen is not None and chosen.xclbin.kernels == ("rmsprop_update",)
    with beside_host(choose.folder, Case(num_devices=2, **OPTIMIZERS["rmsprop"]), path, first=10) as runs:
        for each in runs:
            each.step(0)


FIRE = DeviceError("The card there is on fire.", "Call somebody."), "the other host"
NONSENSE, ROUNDS = (DeviceError("The card there computes nonsense.", "Replace it."), "the other host"), count()


def without_memory(*arguments: Any) -> CardSetup:
    setup = find_cards(*arguments)
    return replace(setup, xclbin=setup.xclbin._replace(memory_bytes=None))


def nonsense(value: Any, group: Any) -> list[Any]:
    """Let a card fail the test of another rank, so that this rank does not test it itself."""
    return [value._replace(process=0, error=NONSENSE[0] if next(ROUNDS) % 2 else None), value]


# What ranks report and raise, how cards are found, or whether they have P2P; the settings; and the error.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[SmartInfinityError], str]] = {
    "P2P is off": ({"p2p": 0}, {}, DeviceError, "The emulated card 0.*p2p enable"),
    # A card has no room for all kernels, so the error says how to build the missing one.
    "no kernel": ({}, {}, DeviceError, "has no kernel adamw_update; it has probe.*make -C hls xclbin OPTIMIZER=adamw"),
    "no file": ({}, {"smartssd": SmartSSDConfig(xclbin="/not/there")}, ConfigError, "/not/there"),
    # The search may fail by an error of any kind, which becomes this rank's report: the others wait for one.
    "an error of our own": (
        {"find": mock.Mock(side_effect=ValueError("no such thing"))},
        {},
        DeviceError,
        r"could not be set up: ValueError\('no such thing'\)",
    ),
    # A card cannot see state in the page cache.
    "buffered": ({}, {"transfer": TransferConfig(direct_io="off")}, ConfigError, "page cache"),
    "plain I/O": ({}, {"transfer": TransferConfig(io_engine="plain")}, ConfigError, "page cache"),
    "another rank has none": (
        {"gathered": another(error=FIRE[0]), "raised": lambda value, group: [value, FIRE]},
        {},
        DeviceError,
        "on fire",
    ),
    "a card fails another rank's test": (
        {"gathered": nonsense, "raised": lambda value, group: [NONSENSE, value]},
        {},
        DeviceError,
        "nonsense",
    ),
    # The second load would remove the first's kernels.
    "another xclbin": (
        {"gathered": another(build="11111111-1111"), "raised": another()},
        {},
        ConfigError,
        "different xclbins.*11111111-1111.*Name one xclbin",
    ),
    # Half of an unknown size is unknown.
    "unknown memory": (
        {"gathered": another(), "raised": another(), "find": without_memory},
        {},
        DeviceError,
        "2 processes share a card, .* does not specify how much memory",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_cards_that_cannot_be_used(
    choose: Choosing,
    emulated_cards: EmulatedCards,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    """With "auto" the host updates, and the log says why; with "smartssd" it is an error, on every rank."""
    changes, settings, error, told = REFUSED[why]
    beside(monkeypatch, changes.get("gathered", alone), changes.get("raised", alone))
    monkeypatch.setattr(update_device, "find_cards", changes.get("find", find_cards))
    emulated_cards.set("p2p", changes.get("p2p", 1))
    if why == "no kernel":
        settings = {"smartssd": SmartSSDConfig(xclbin=choose.build.probe_xclbin)}
    assert choose("auto", **settings) is None
    assert re.search(f"the host updates, since SmartSSDs cannot: .*{told}", caplog.text)
    with pytest.raises(error, match=told):
        choose("smartssd", **settings)
    assert changes.get("gathered") is not nonsense or emulated_cards.counter("runs_begun") == 0


def test_host_is_chosen_without_a_search(choose: Choosing, caplog: pytest.LogCaptureFixture) -> None:
    """With "auto" the host updates without an xclbin, and for other formats; the log says why."""
    with caplog.at_level(logging.INFO):
        assert choose(smartssd=None) is choose(state_format="int8") is choose("host") is None
    no_file, no_format = [record.getMessage() for record in caplog.records if record.name.endswith("update_device")]
    assert "no xclbin for SmartSSDs is named" in no_file and "in 'fp32' alone, not 'int8'" in no_format


def test_cards_whose_memory_is_too_small(
    choose: Choosing, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto" the host updates if the cards' memory is too small, and nothing of the trial is left on them.

    The memory that each rank may take of a card decides.
    """
    transfer = TransferConfig(num_buffers=2, tasklet_bytes=32 << 20)
    used = emulated_cards.counter("num_buffers", 1)
    emulated_cards.set("dram_mib", 64, card=1)
    assert choose(transfer=transfer) is None
    assert "The emulated card 1" in caplog.text and "tasklet_bytes=" in caplog.text
    assert emulated_cards.counter("num_buffers", 1) == used
    emulated_cards.reset()
    beside(monkeypatch, lambda value, group: [value] * 40)
    assert choose(transfer=TransferConfig(num_buffers=2)) is None
    assert "each of 40 processes may take" in caplog.text


@pytest.mark.parametrize(
    ("gradient", "parameter", "mib"),
    long_but([(4, 4, 107), (2, 2, 86)], [(4, 4, 107), (4, 2, 97), (2, 4, 97), (2, 2, 86)]),
)
def test_memory_for_the_types_of_gradients_and_parameters(
    choose: Choosing, emulated_cards: EmulatedCards, gradient: int, parameter: int, mib: int
) -> None:
    """The trial counts gradients and parameters of their types beside two tasklets of 32 MiB of state."""
    transfer = TransferConfig(num_buffers=2, tasklet_bytes=32 << 20)
    for memory, fits in ((mib, True), (mib - 1, False)):
        emulated_cards.set("dram_mib", memory)
        assert (choose(transfer=transfer, gradient_itemsize=gradient, parameter_itemsize=parameter) is not None) == fits


@pytest.mark.parametrize(("optimizer", "largest"), [("Adam", 12 << 29), ("SGD", 8 << 29)])
def test_tasklets_that_no_kernel_works(choose: Choosing, optimizer: str, largest: int) -> None:
    """Tasklets that are too large are refused before anything is written; the error gives the largest size."""
    with pytest.raises(ConfigError, match=f"too large for SmartSSDs.*pass {largest} at most"):
        choose("smartssd", optimizer=optimizer, transfer=TransferConfig(tasklet_bytes=2 * largest))
    assert list(choose.folder.iterdir()) == []
    assert choose("smartssd", optimizer=optimizer, transfer=TransferConfig(tasklet_bytes=largest)) is not None


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_another_rank(
    choose: Choosing, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Each rank takes half of the cards' memory, or all if the other one is on another machine or other cards.

    Only the lowest rank that has a card tests it.
    """
    for changes, sharers, tested in (
        ({}, 2, [True, True]),
        ({"process": 0}, 2, [False, False]),
        ({"process": 0, "cards": ("1", "2")}, 2, [True, False]),
        ({"process": 0, "cards": ("7", "8")}, 1, [True, True]),
        ({"process": 0, "machine": "another", "build": "1"}, 1, [True, True]),
    ):
        beside(monkeypatch, lambda value, group, of=changes: [value._replace(**of), value])
        emulated_cards.reset()
        chosen = choose(wanted)
        assert chosen is not None and chosen.sharers == sharers
        assert [emulated_cards.counter("runs_completed", card) > 0 for card in range(2)] == tested
