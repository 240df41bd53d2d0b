"""Which device updates: cards are chosen where they can be used, and the reason is told where they cannot."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from hls.description import design_for
from hls.xclbin import xclbin
from lightning_smartinfinity import (
    ConfigError,
    DeviceError,
    SmartSSDConfig,
    TransferConfig,
)
from lightning_smartinfinity.devices.smartssd import System, find_cards, self_test, unreturned
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from lightning_smartinfinity.settings import CARD_TASKLET_BYTES, HOST_TASKLET_BYTES
from lightning_smartinfinity.settings.smartssd import XCLBIN_VARIABLE
from lightning_smartinfinity.zero3.ranks import collectives
from lightning_smartinfinity.zero3.setup import update_device
from lightning_smartinfinity.zero3.setup.update_device import choose_update_device
from tests.helpers.card_runs import OPTIMIZERS, cards, same_as_host, settled_host
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that, lenient
from tests.pipeline.harness import Case, running
from tests.xrt.cards import EmulatedCards
from tests.xrt.self_tests import held_queue, offload

pytestmark = RunIf(xrt=True)


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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group."""
    monkeypatch.delenv(XCLBIN_VARIABLE, raising=False)
    for module in (collectives, update_device):
        monkeypatch.setattr(module, "gather", lambda value, group: [value])


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


@pytest.mark.parametrize(
    ("gradient", "parameter", "mib"),
    long_but([(4, 4, 107), (2, 2, 86)], [(4, 4, 107), (4, 2, 97), (2, 4, 97), (2, 2, 86)]),
)
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
