"""Tests what a card has to pass before it gets state, which cards are chosen, and ``smart-infinity selftest``."""

from __future__ import annotations

import errno
import importlib
import json
import logging
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hls.description import design_for
from hls.xclbin import xclbin
from lightning_smartinfinity import (
    ConfigError,
    DeviceError,
    SmartSSDConfig,
    StorageError,
    TransferConfig,
    native,
)
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.config import CARD_TASKLET_BYTES, HOST_TASKLET_BYTES
from lightning_smartinfinity.devices.smartssd import CardSetup, System, find_cards, self_test, unreturned
from lightning_smartinfinity.devices.smartssd.discovery.xclbin import XCLBIN_VARIABLE
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from lightning_smartinfinity.zero3 import collectives, update_device
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.update_device import choose_update_device
from tests.helpers import native_testing as testing
from tests.helpers.card_runs import OPTIMIZERS, cards, same_as_host, settled_host, setup_of
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that, lenient
from tests.transfer.harness import Case, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

# The package has a function of that name.
self_test_module = importlib.import_module("lightning_smartinfinity.devices.smartssd.self_test")


def test_cards_that_pass(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Every card runs every kernel thrice for each type; folders need not exist, and nothing is left in them."""
    setup = setup_of(2, emulated_cards.build.xclbin)
    self_test(setup, [tmp_path / "a/not/yet", tmp_path], KERNELS)
    assert [emulated_cards.counter("runs_completed", card) for card in range(2)] == [9 * len(KERNELS)] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("pointer", "bit", "words"),
    [("status", 32, "version"), ("parameter", 64 * 32, "parameters arrived"), ("master", 64 * 32, "other bits")],
)
def test_a_card_that_computes_something_else(
    tmp_path: Path, emulated_cards: EmulatedCards, kernel: Any, pointer: str, bit: int, words: str
) -> None:
    """A wrong interface version, wrong parameters and wrong state are all reported."""
    pointers = {"status": 2 * kernel.num_arrays + 2, "parameter": 2 * kernel.num_arrays + 1, "master": 1}
    # The second of the tile's runs is the one that updates.
    emulated_cards.inject("corrupt", card=1, skipped=1, pointer=pointers[pointer], bit=bit)
    with pytest.raises(DeviceError, match=words):
        self_test(setup_of(2, emulated_cards.build.xclbin), [tmp_path, tmp_path], [kernel])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "float16")])
def test_a_card_that_computes_something_else_in_one_type(
    tmp_path: Path, emulated_cards: EmulatedCards, number: int, dtype: str
) -> None:
    """Every type that gradients and parameters may have is tried."""
    emulated_cards.inject("corrupt", skipped=3 * number + 1, pointer=1, bit=64 * 32)
    with pytest.raises(DeviceError, match=rf"other bits than the host \(gradients and parameters in {dtype}\)"):
        self_test(setup_of(1, emulated_cards.build.xclbin), [tmp_path], KERNELS[:1])


@pytest.mark.parametrize(("kind", "words"), [("error", "ERROR"), ("hang", "did not return within {} ms")])
def test_a_card_whose_run_fails(tmp_path: Path, emulated_cards: EmulatedCards, kind: str, words: str) -> None:
    """The error tells how the run ended, on which card and with which folder."""
    emulated_cards.reset(count=5)
    emulated_cards.inject(kind, card=4)
    deadline = lenient()
    setup = setup_of(1, emulated_cards.build.xclbin, first=4, timeout=deadline)
    with pytest.raises(DeviceError, match=words.format(round(1000 * deadline))) as failed:
        self_test(setup, [tmp_path / "a"], KERNELS[:1])
    assert f"emulated card 4 in {str(tmp_path / 'a')!r}" in str(failed.value)
    assert ".smart-infinity-" not in str(failed.value)


def test_a_card_that_has_not_returned(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """The next test of such a card fails at once, until the run that was given up returns."""
    emulated_cards.reset(count=6)
    emulated_cards.inject("hang", card=5)
    setup = setup_of(1, emulated_cards.build.xclbin, first=5, timeout=lenient())
    with pytest.raises(DeviceError, match="did not return within"):
        self_test(setup, [tmp_path], KERNELS[:1])
    begun = emulated_cards.counter("runs_begun", 5)
    with pytest.raises(
        DeviceError, match="emulated card 5 has not returned from a run or transfer that this process abandoned"
    ):
        self_test(setup, [tmp_path], KERNELS[:1])
    assert emulated_cards.counter("runs_begun", 5) == begun
    emulated_cards.release(5)
    emulated_cards.wait_for("run-end", card=5)
    self_test(replace(setup, settings=SmartSSDConfig(xclbin=emulated_cards.build.xclbin)), [tmp_path], KERNELS[:1])


def held_queue(monkeypatch: pytest.MonkeyPatch, **where: int) -> list[testing.Hold]:
    """Hold one request of every queue from now on."""
    holds = []

    class HeldBuffer:
        def __init__(self, buffer: native.CardBuffer) -> None:
            self._buffer = buffer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._buffer, name)

        def queue(self, *, timeout_ms: int) -> native.FileQueue:
            queue = self._buffer.queue(timeout_ms=timeout_ms)
            holds.append(testing.Hold(queue, **where))
            return queue

    through = self_test_module._through
    monkeypatch.setattr(
        self_test_module,
        "_through",
        lambda card, buffer, *arguments, **settings: through(card, HeldBuffer(buffer), *arguments, **settings),
    )
    return holds


@pytest.mark.parametrize(("where", "verb"), [("read_at", "reading"), ("write_at", "writing")])
def test_p2p_that_does_not_return(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, where: str, verb: str
) -> None:
    """A late transfer is given up and keeps the card's memory until it returns; then the card can be used again."""
    before = emulated_cards.counter("num_buffers")
    setup = setup_of(1, emulated_cards.build.xclbin, timeout=lenient())
    with monkeypatch.context() as patched:
        (hold,) = _given_up(setup, tmp_path, held_queue(patched, **{where: 0}), verb)
    assert list(tmp_path.iterdir()) == []
    assert emulated_cards.counter("num_buffers") == before + 1
    with pytest.raises(DeviceError, match="has not returned from a run or transfer that this process abandoned"):
        self_test(setup, [tmp_path], KERNELS[:1])
    hold.release()
    await_that(unreturned.close_returned)
    assert emulated_cards.counter("num_buffers") == before
    self_test(replace(setup, settings=SmartSSDConfig(xclbin=emulated_cards.build.xclbin)), [tmp_path], KERNELS[:1])


def _given_up(setup: CardSetup, folder: Path, holds: list[testing.Hold], verb: str) -> list[testing.Hold]:
    with pytest.raises(
        DeviceError,
        match=rf"P2P between the emulated card 0 and its SSD failed: {verb} 1048576 bytes .*within \d+ ms.*kernel log",
    ):
        self_test(setup, [folder], KERNELS[:1])
    return holds


@pytest.mark.usefixtures("alone")
def test_p2p_that_does_not_return_leaves_it_to_the_host(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With "auto" the host updates, and the log says why; with "smartssd" it is an error."""
    holds = held_queue(monkeypatch, read_at=0)
    config = SmartSSDConfig(xclbin=emulated_cards.build.xclbin, timeout=lenient())
    asked = offload(tmp_path, emulated_cards, smartssd=config)
    assert choose_update_device(asked, optimizer="Adam").cards is None
    assert "since SmartSSDs cannot: P2P between the emulated card 0 and its SSD failed" in caplog.text
    for hold in holds:
        hold.release()
    await_that(unreturned.close_returned)
    with pytest.raises(DeviceError, match=r"did not return within \d+ ms"):
        choose_update_device(replace(asked, update_device="smartssd"), optimizer="Adam")
    holds[-1].release()
    await_that(unreturned.close_returned)


def test_an_ssd_that_fails(tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the SSD names the card and the storage folder."""

    class Failing(native.Pipeline):
        def submit(self, batch: native.Batch) -> None:
            testing.inject(self, fail_read_at=0, errno=errno.EIO)
            super().submit(batch)

    monkeypatch.setattr(native, "Pipeline", Failing)
    with pytest.raises(StorageError, match="health") as failed:
        self_test(setup_of(1, emulated_cards.build.xclbin), [tmp_path], KERNELS[:1])
    assert f"emulated card 0 in {str(tmp_path)!r}" in str(failed.value)
    assert ".smart-infinity-" not in str(failed.value)


def test_p2p_that_is_off(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Where sysfs does not tell that P2P is off, only the allocation of a buffer on the card can."""
    emulated_cards.set("p2p", 0)
    with pytest.raises(DeviceError, match="xbutil configure --p2p enable"):
        self_test(setup_of(1, emulated_cards.build.xclbin), [tmp_path], KERNELS[:1])


def test_an_xclbin_without_the_kernel(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """An xclbin without our kernel, such as the probe's, is refused, and the error says how to build it."""
    emulated_cards.reset(count=7)
    with pytest.raises(DeviceError, match=r"adamw_update.* of this version: make -C hls xclbin"):
        self_test(setup_of(1, emulated_cards.build.probe_xclbin, first=6), [tmp_path], KERNELS[:1])


# ---- which device updates


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group."""
    monkeypatch.delenv(XCLBIN_VARIABLE, raising=False)
    for module in (collectives, update_device):
        monkeypatch.setattr(module, "gather", lambda value, group: [value])


def offload(tmp_path: Path, cards: EmulatedCards, wanted: str = "auto", **settings: Any) -> OffloadSettings:
    return OffloadSettings(
        storage=(tmp_path / "a", tmp_path / "b"),
        transfer=settings.pop("transfer", TransferConfig(num_buffers=2)),
        update_device=wanted,
        smartssd=settings.pop("smartssd", SmartSSDConfig(xclbin=cards.build.xclbin)),
        **settings,
    )


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
@pytest.mark.usefixtures("alone")
def test_cards_are_chosen(tmp_path: Path, emulated_cards: EmulatedCards, wanted: str) -> None:
    """Cards are chosen where they can be used; tasklets are then large unless the user says otherwise."""
    chosen = choose_update_device(offload(tmp_path, emulated_cards, wanted), optimizer="SGD")
    assert chosen.cards is not None and len(chosen.cards.cards) == 2
    assert chosen.tasklet_bytes == CARD_TASKLET_BYTES >= 16 << 20
    assert replace(chosen, cards=None).tasklet_bytes == HOST_TASKLET_BYTES
    asked = offload(tmp_path, emulated_cards, wanted, transfer=TransferConfig(tasklet_bytes=1 << 20))
    with pytest.warns(UserWarning, match=r"tasklet_bytes=1048576\) is small for SmartSSDs"):
        assert choose_update_device(asked, optimizer="SGD").tasklet_bytes == 1 << 20
    asked = offload(tmp_path, emulated_cards, wanted, transfer=TransferConfig(num_buffers=2, dram_cache_bytes="auto"))
    with pytest.warns(UserWarning, match=r"dram_cache_bytes='auto'\) is ignored"):
        choose_update_device(asked, optimizer="SGD")


@pytest.mark.usefixtures("alone")
def test_an_xclbin_with_the_kernel_of_rmsprop_alone(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Cards that have no other kernel pass the self-test, are chosen, and update as the host does."""
    path = tmp_path / "rmsprop.xclbin"
    path.write_bytes(xclbin(design_for("rmsprop")))
    emulated_cards.reset(count=12)
    settings = SmartSSDConfig(xclbin=path, devices=[10, 11])
    asked = offload(tmp_path, emulated_cards, smartssd=settings)
    kernels = [kernel for kernel in KERNELS if kernel.name == "rmsprop_update"]
    self_test(find_cards(asked.storage, settings, System()), asked.storage, kernels)
    chosen = choose_update_device(asked, optimizer="RMSprop").cards
    assert chosen is not None and chosen.xclbin.kernels == ("rmsprop_update",)
    case = Case(num_devices=2, **OPTIMIZERS["rmsprop"])
    with (
        running(tmp_path / "cards", case, device=cards(path, first=10)) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for each in (run, host):
            each.step(0)
        same_as_host(run, host)


@pytest.mark.usefixtures("alone")
def test_an_xclbin_for_other_optimizers(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A card has no room for all kernels, so the error says how to build the missing one."""
    without = SmartSSDConfig(xclbin=emulated_cards.build.probe_xclbin)
    with pytest.raises(DeviceError, match="has no kernel sgd_update; it has probe") as caught:
        choose_update_device(offload(tmp_path, emulated_cards, "smartssd", smartssd=without), optimizer="SGD")
    assert "make -C hls xclbin OPTIMIZER=sgd" in caught.value.remedy


@pytest.mark.usefixtures("alone")
def test_host_is_chosen_and_the_reason_told(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture
) -> None:
    """With "auto" the host updates without an xclbin, for other formats, and if cards fail; "smartssd" raises."""
    with caplog.at_level(logging.INFO):
        asked = offload(tmp_path, emulated_cards, smartssd=None)
        assert choose_update_device(asked, optimizer="Adam").cards is None
        asked = offload(tmp_path, emulated_cards, state_format="int8")
        assert choose_update_device(asked, optimizer="Adam").cards is None
        assert choose_update_device(offload(tmp_path, emulated_cards, "host"), optimizer="Adam").cards is None
        emulated_cards.set("p2p", 0)
        assert choose_update_device(offload(tmp_path, emulated_cards), optimizer="Adam").cards is None
    no_file, no_format, no_p2p = [
        record.getMessage() for record in caplog.records if record.name.endswith("update_device")
    ]
    assert "no xclbin for SmartSSDs is named" in no_file
    assert "in 'fp32' alone, not 'int8'" in no_format
    assert "the host updates, since SmartSSDs cannot: The emulated card 0" in no_p2p
    with pytest.raises(DeviceError, match="p2p enable"):
        choose_update_device(offload(tmp_path, emulated_cards, "smartssd"), optimizer="Adam")


@pytest.mark.usefixtures("alone")
def test_cards_whose_memory_is_too_small(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture
) -> None:
    """With "auto" the host updates if the cards' memory is too small, and nothing of the trial is left on them."""
    asked = offload(tmp_path, emulated_cards, transfer=TransferConfig(num_buffers=2, tasklet_bytes=32 << 20))
    used = emulated_cards.counter("num_buffers", 1)
    emulated_cards.set("dram_mib", 64, card=1)
    assert choose_update_device(asked, optimizer="Adam").cards is None
    assert "The emulated card 1" in caplog.text and "tasklet_bytes=" in caplog.text
    assert emulated_cards.counter("num_buffers", 1) == used
    emulated_cards.set("dram_mib", 128, card=1)
    assert choose_update_device(asked, optimizer="Adam").cards is not None


@pytest.mark.parametrize(("gradient", "parameter", "mib"), [(4, 4, 107), (4, 2, 97), (2, 4, 97), (2, 2, 86)])
@pytest.mark.usefixtures("alone")
def test_memory_for_the_types_of_gradients_and_parameters(
    tmp_path: Path, emulated_cards: EmulatedCards, gradient: int, parameter: int, mib: int
) -> None:
    """The trial counts gradients and parameters of their types beside two tasklets of 32 MiB of state."""
    asked = offload(
        tmp_path,
        emulated_cards,
        transfer=TransferConfig(num_buffers=2, tasklet_bytes=32 << 20),
        gradient_itemsize=gradient,
        parameter_itemsize=parameter,
    )
    emulated_cards.set("dram_mib", mib)
    assert choose_update_device(asked, optimizer="Adam").cards is not None
    emulated_cards.set("dram_mib", mib - 1)
    assert choose_update_device(asked, optimizer="Adam").cards is None


@pytest.mark.usefixtures("alone")
def test_memory_that_cannot_be_tried(
    tmp_path: Path, emulated_cards: EmulatedCards, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of any kind becomes this rank's report, because the others wait for one."""

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(update_device, "require_memory", fail)
    assert choose_update_device(offload(tmp_path, emulated_cards), optimizer="Adam").cards is None
    assert "could not be set up: ValueError('no such thing')" in caplog.text


def test_cards_whose_memory_is_too_small_for_several_ranks(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory that each rank may take of a card decides."""
    monkeypatch.setattr(update_device, "gather", lambda value, group: [value] * 40)
    asked = offload(tmp_path, emulated_cards, transfer=TransferConfig(num_buffers=2))
    assert choose_update_device(asked, optimizer="Adam").cards is None
    assert "each of 40 processes may take" in caplog.text


@pytest.mark.parametrize("named", ["~nosuch/x", "/not/there"])
@pytest.mark.usefixtures("alone")
def test_a_variable_that_names_no_file(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """With "auto" the host updates; with "smartssd" the error names the path."""
    monkeypatch.setenv(XCLBIN_VARIABLE, named)
    asked = offload(tmp_path, emulated_cards, smartssd=None)
    assert choose_update_device(asked, optimizer="Adam").cards is None
    with pytest.raises(ConfigError, match=named):
        choose_update_device(replace(asked, update_device="smartssd"), optimizer="Adam")


@pytest.mark.parametrize("settings", [{"direct_io": "off"}, {"io_engine": "plain"}])
@pytest.mark.usefixtures("alone")
def test_page_cache_is_out_of_reach(tmp_path: Path, emulated_cards: EmulatedCards, settings: dict[str, str]) -> None:
    """Settings that put state into the page cache are refused, because a card cannot see it there."""
    asked = offload(tmp_path, emulated_cards, "smartssd", transfer=TransferConfig(**settings))
    with pytest.raises(ConfigError, match="page cache"):
        choose_update_device(asked, optimizer="Adam")
    assert choose_update_device(replace(asked, update_device="auto"), optimizer="Adam").cards is None


@pytest.mark.parametrize(("optimizer", "largest"), [("Adam", 12 << 29), ("SGD", 8 << 29)])
@pytest.mark.usefixtures("alone")
def test_tasklets_that_no_kernel_works(
    tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, largest: int
) -> None:
    """Tasklets that are too large are refused before anything is written; the error gives the largest size."""
    asked = offload(tmp_path, emulated_cards, "smartssd", transfer=TransferConfig(tasklet_bytes=2 * largest))
    with pytest.raises(ConfigError, match=f"too large for SmartSSDs.*pass {largest} at most"):
        choose_update_device(asked, optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []
    allowed = replace(asked, transfer=TransferConfig(tasklet_bytes=largest))
    assert choose_update_device(allowed, optimizer=optimizer).cards is not None


CARD, OTHER_CARD = "0000:42:00.1", "0000:43:00.1"


def reports(*builds: str, machine: str = "one", card: str = CARD) -> list[update_device._Report]:
    return [update_device._Report(machine, "host", 1, (card,), build, None) for build in builds]


def test_ranks_on_one_card() -> None:
    """Ranks on one card share its memory evenly and have to load one xclbin; other cards may have another."""
    assert update_device._sharers(reports("x", "x", "x")) == 3
    assert update_device._sharers([*reports("x", "x"), *reports("y", machine="two")]) == 2
    assert update_device._disagreement([*reports("x", "x"), *reports("y", machine="two")]) is None
    assert update_device._disagreement([*reports("x", "x"), *reports("y", card=OTHER_CARD)]) is None
    error = update_device._disagreement([*reports("x", "y"), *reports("z", card=OTHER_CARD)])
    assert isinstance(error, ConfigError) and f"same card {CARD}: x, y." in error.problem


def beside(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let another rank report what this one does, with changes, because processes do not share emulated cards."""
    monkeypatch.setattr(update_device, "gather", lambda value, group: [value, value._replace(**changes)])
    # What this rank raises is what all raise.
    monkeypatch.setattr(collectives, "gather", lambda value, group: [value, value])


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_another_rank_on_the_same_cards(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Each rank takes half of the cards' memory, or all if the other one is on another machine or other cards."""
    asked = offload(tmp_path, emulated_cards, wanted)
    shares = []
    for changes in ({}, {"machine": "another"}, {"cards": ("7", "8")}, {"cards": ("1", "2")}):
        beside(monkeypatch, **changes)
        chosen = choose_update_device(asked, optimizer="Adam").cards
        assert chosen is not None
        shares.append(chosen.sharers)
    assert shares == [2, 1, 1, 2]


def test_another_rank_on_cards_of_unknown_memory(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of an unknown size is unknown, so every rank raises, or the host updates."""

    def find(*arguments: Any) -> CardSetup:
        setup = find_cards(*arguments)
        return replace(setup, xclbin=setup.xclbin._replace(memory_bytes=None))

    monkeypatch.setattr(update_device, "find_cards", find)
    beside(monkeypatch)
    assert choose_update_device(offload(tmp_path, emulated_cards, "auto"), optimizer="Adam").cards is None
    with pytest.raises(DeviceError, match=r"2 processes share a card, .* does not tell how much memory"):
        choose_update_device(offload(tmp_path, emulated_cards, "smartssd"), optimizer="Adam")
    beside(monkeypatch, machine="another")
    assert choose_update_device(offload(tmp_path, emulated_cards, "smartssd"), optimizer="Adam").cards is not None


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_one_rank_tests_a_card_that_several_share(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """Only the lowest rank that has a card tests it."""
    runs = []
    for changes in ({}, {"process": 0}, {"process": 0, "cards": ("1",)}, {"process": 0, "machine": "another"}):
        monkeypatch.setattr(update_device, "gather", lambda value, group, of=changes: [value._replace(**of), value])
        monkeypatch.setattr(collectives, "gather", lambda value, group: [value, value])
        emulated_cards.reset()
        assert choose_update_device(offload(tmp_path, emulated_cards, wanted), optimizer="Adam").cards is not None
        runs.append([emulated_cards.counter("runs_completed", card) > 0 for card in range(2)])
    assert runs == [[True, True], [False, False], [True, False], [True, True]]


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_a_card_that_fails_the_test_of_another_rank(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wanted: str,
) -> None:
    """This rank does not use the card, and has not tested it itself."""
    failure, rounds = DeviceError("The card there computes nonsense.", "Replace it."), count()

    def gathered(value: Any, group: Any) -> list[Any]:
        return [value._replace(process=0, error=failure if next(rounds) else None), value]

    monkeypatch.setattr(update_device, "gather", gathered)
    monkeypatch.setattr(collectives, "gather", lambda value, group: [(failure, "the other host"), value])
    asked = offload(tmp_path, emulated_cards, wanted)
    if wanted == "smartssd":
        with pytest.raises(DeviceError, match="nonsense"):
            choose_update_device(asked, optimizer="Adam")
    else:
        assert choose_update_device(asked, optimizer="Adam").cards is None
        assert "nonsense" in caplog.text
    assert emulated_cards.counter("runs_begun") == 0


def test_another_rank_with_another_xclbin(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two xclbins on one card are refused, or the host updates: the second load would remove the first's kernels."""
    beside(monkeypatch, build="11111111-1111-1111-1111-111111111111")
    with pytest.raises(ConfigError, match=r"different xclbins.*11111111-.*Name one xclbin"):
        choose_update_device(offload(tmp_path, emulated_cards, "smartssd"), optimizer="Adam")
    assert choose_update_device(offload(tmp_path, emulated_cards), optimizer="Adam").cards is None
    assert "different xclbins" in caplog.text
    beside(monkeypatch, build="11111111-1111-1111-1111-111111111111", machine="another")
    assert choose_update_device(offload(tmp_path, emulated_cards), optimizer="Adam").cards is not None


@pytest.mark.parametrize("wanted", ["auto", "smartssd"])
def test_another_rank_without_cards(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wanted: str,
) -> None:
    """If one rank has no cards, no rank uses them: all use the host, or all raise that rank's error."""
    failure = DeviceError("The card there is on fire.", "Call somebody.")
    monkeypatch.setattr(collectives, "gather", lambda value, group: [value, (failure, "the other host")])
    monkeypatch.setattr(update_device, "gather", lambda value, group: [value, value._replace(error=failure)])
    asked = offload(tmp_path, emulated_cards, wanted)
    if wanted == "smartssd":
        with pytest.raises(DeviceError, match="on fire"):
            choose_update_device(asked, optimizer="Adam")
        return
    assert choose_update_device(asked, optimizer="Adam").cards is None
    assert "on fire" in caplog.text


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


def test_command_on_a_file(tmp_path: Path, emulated_cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """The command refuses a file for a folder, as training does, and addresses of emulated cards."""
    file = tmp_path / "file"
    file.touch()
    arguments = ["selftest", "--mib", "1", "--xclbin", str(emulated_cards.build.xclbin), str(file)]
    assert main(arguments) == 1
    assert "A file stands where a folder should be" in capsys.readouterr().out
    assert main([*arguments, "--devices", "3d:00.1"]) == 1
    assert "emulated cards have numbers alone" in capsys.readouterr().out
    for name in ("²", "9" * 5000):
        with pytest.raises(ConfigError, match="numbers alone"):
            find_cards([tmp_path], SmartSSDConfig(xclbin=emulated_cards.build.xclbin, devices=[name]), System())
