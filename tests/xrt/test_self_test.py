"""Tests what a card has to pass before it gets state, which cards are chosen, and ``smart-infinity selftest``."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from lightning_smartinfinity import (
    DeviceError,
    SmartSSDConfig,
    StorageError,
    native,
)
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.devices.smartssd import self_test, unreturned
from lightning_smartinfinity.devices.smartssd.discovery.runtime import Runtime, require_runtime
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from tests.helpers import native_testing as testing
from tests.helpers.card_runs import setup_of
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that, lenient
from tests.helpers.xrt import VERSION
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)


def test_cards_that_pass(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Every card runs every kernel thrice for each type; folders need not exist, and nothing is left in them."""
    setup = setup_of(2, emulated_cards.build.xclbin)
    self_test(setup, [tmp_path / "a/not/yet", tmp_path], KERNELS)
    assert [emulated_cards.counter("runs_completed", card) for card in range(2)] == [9 * len(KERNELS)] * 2
    assert list(tmp_path.iterdir()) == []


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
        assert ".smart-infinity-" not in str(failed.value)
        assert not fault or f"emulated card 5 in {str(tmp_path / 'a')!r}" in str(failed.value)
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
    assert list(tmp_path.iterdir()) == []
    assert emulated_cards.counter("num_buffers") == before + 1
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
    assert f"emulated card 0 in {str(tmp_path)!r}" in str(failed.value)
    assert ".smart-infinity-" not in str(failed.value)


# ---- smart-infinity selftest


def test_command_on_emulated_cards(
    tmp_path: Path, emulated_cards: EmulatedCards, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command shows pairs, P2P with its speed and a test of every kernel, exits with 0 and leaves nothing."""
    folders = [tmp_path / "a", tmp_path / "b"]
    arguments = ["selftest", "--mib", "2", "--xclbin", str(emulated_cards.build.xclbin), *map(str, folders)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Everything that was tried is ok." in shown and "FAIL" not in shown
    assert "2 MiB written back unchanged" in shown and "GB/s from the SSD" in shown
    assert re.search(rf"version +{re.escape(VERSION)}\.", shown)
    assert shown.count("one tasklet, bit for bit as on the host") == 2 * len(KERNELS)
    assert main([*arguments, "--json", "--devices", "1", "0"]) == 0
    content = json.loads(capsys.readouterr().out)
    pairs = {finding["subject"]: finding["value"] for finding in content["findings"] if finding["name"] == "card"}
    assert content["ok"] and pairs == {str(folders[0]): "emulated card 1", str(folders[1]): "emulated card 0"}
    assert list(tmp_path.iterdir()) == []


def test_command_on_a_card_that_fails(
    tmp_path: Path, emulated_cards: EmulatedCards, capsys: pytest.CaptureFixture[str]
) -> None:
    """One finding fails and says what to do, the others are made all the same, and the exit status is 1."""
    emulated_cards.inject("error", skipped=9)
    assert main(["selftest", "--mib", "1", "--xclbin", str(emulated_cards.build.xclbin), str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [number for number, line in enumerate(lines) if line.startswith("  FAIL")]
    assert len(failed) == 1
    assert "adagrad_update" in lines[failed[0]] and "ERROR" in lines[failed[0]]
    assert lines[failed[0] + 1].startswith("        -> ") and "sgd_update" in lines[failed[0] + 2]
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
