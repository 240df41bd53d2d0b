"""Cards give the same results through pyxrt as through the C library, and recover from failures alike."""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_smartinfinity import DeviceError
from lightning_smartinfinity.devices.smartssd import self_test
from lightning_smartinfinity.devices.smartssd.discovery.cards import Card
from lightning_smartinfinity.devices.smartssd.discovery.p2p import P2P, P2PState
from lightning_smartinfinity.devices.smartssd.discovery.pci import PciPath
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS
from lightning_smartinfinity.devices.smartssd.pyxrt_binding import PyxrtBinding, _opened
from tests.helpers.card_runs import OPTIMIZERS, cards, same_as_host, settled_host, setup_of
from tests.helpers.runif import RunIf
from tests.helpers.waiting import lenient
from tests.pipeline.harness import Case, Run, running
from tests.xrt.cards import EmulatedCards
from tests.xrt.pyxrt import current

pytestmark = [RunIf(xrt=True), pytest.mark.filterwarnings("error:.* use hw_context:DeprecationWarning")]


@pytest.fixture(autouse=True, params=["2.13", "current"])
def form(request: pytest.FixtureRequest, pyxrt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let ``import pyxrt`` find the form of XRT 2.13, or that of XRT's master, whose deprecated calls fail a test."""
    module = current(pyxrt) if request.param == "current" else pyxrt
    monkeypatch.setitem(sys.modules, "pyxrt", module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_as_host(tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, dtype: torch.dtype) -> None:
    """Steps through pyxrt give the host's bits: floats travel as bits, and buffers live as long as their maps."""
    case = Case(dtype=dtype, num_devices=2, **OPTIMIZERS[optimizer])
    with (
        running(tmp_path / "card", case, device=cards(emulated_cards.build.xclbin, binding="pyxrt")) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for step in range(3):
            run.step(step)
            host.step(step)
        same_as_host(run, host)
        assert "XRT by pyxrt" in run.device.description


def test_no_warning_reaches_the_user(emulated_cards: EmulatedCards, form: ModuleType) -> None:
    """A card and its kernels open in the form that pyxrt has, without a call that it deprecates."""
    setup = setup_of(1, emulated_cards.build.xclbin, binding="pyxrt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        binding = PyxrtBinding(setup.cards[0], setup.xclbin, num_cards=1)
        kernels = [binding.kernel(kernel.name) for kernel in KERNELS]
    assert all(isinstance(kernel, form.kernel) and binding.group(kernel, 0) == 0 for kernel in kernels)
    assert caught == []


def test_failures(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """When a run or call fails in each step, the host takes over."""
    choose = random.Random(0)
    device = cards(emulated_cards.build.xclbin, binding="pyxrt")
    case = Case(num_devices=2)
    with (
        running(tmp_path / "card", case, device=device) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for step in range(20):
            kind = choose.choice(["error", "abort", "submit", "sync"])
            emulated_cards.inject(kind, card=choose.randrange(2), skipped=choose.randrange(2))
            run.step(step)
            host.step(step)
        same_as_host(run, host)


def test_a_run_that_does_not_return(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A run that does not return is given up at its deadline, and the host takes over."""
    case = Case(num_devices=1)
    with (
        running(
            tmp_path / "card", case, device=cards(emulated_cards.build.xclbin, binding="pyxrt", timeout=lenient())
        ) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        emulated_cards.inject("hang", card=0)
        run.steps([0, 1])
        emulated_cards.release()
        host.steps([0, 1])
        same_as_host(run, host)


def test_self_test_and_refusals(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Sound cards pass the self-test, and what pyxrt raises becomes our own error."""
    self_test(setup_of(2, emulated_cards.build.xclbin, binding="pyxrt"), [tmp_path, tmp_path], KERNELS)
    with pytest.raises(DeviceError, match="emulated card 5"):
        self_test(setup_of(1, emulated_cards.build.xclbin, binding="pyxrt", first=5), [tmp_path], KERNELS)
    emulated_cards.reset(count=7)
    with pytest.raises(DeviceError, match=r"kernel failed.* of this version: make -C hls xclbin"):
        self_test(setup_of(1, emulated_cards.build.probe_xclbin, binding="pyxrt", first=6), [tmp_path], KERNELS[:1])
    emulated_cards.set("dram_mib", 1)
    with pytest.raises(DeviceError, match="emulated card 0"):
        Run(tmp_path / "run", Case(num_buffers=64), device=cards(emulated_cards.build.xclbin, binding="pyxrt"))


def test_a_module_that_is_not_there(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """binding="pyxrt" without pyxrt is an error that names it."""
    monkeypatch.setitem(sys.modules, "pyxrt", None)
    with pytest.raises(DeviceError, match="pyxrt"):
        self_test(setup_of(1, emulated_cards.build.xclbin, binding="pyxrt"), [tmp_path], KERNELS)


REAL_CARD = Card(
    1, PciPath(("pci0000:3a", "0000:3a:00.0", "0000:3d:00.1")), None, None, P2P(P2PState.UNKNOWN, None, None)
)


class OldPyxrt:
    """A pyxrt before 2.13, which opens cards by number alone and tells this address of them, if any."""

    def __init__(self, address: str | None) -> None:
        if address is not None:
            self.xrt_info_device = SimpleNamespace(bdf=address)

    def device(self, which: object) -> SimpleNamespace:
        if isinstance(which, str):
            raise TypeError("incompatible constructor arguments")
        return SimpleNamespace(number=which, get_info=str)


def test_real_cards_open_by_address() -> None:
    """A card is opened by address, or, with a pyxrt before 2.13, by number, after which its address is checked."""
    assert _opened(SimpleNamespace(device=lambda which: which), REAL_CARD, num_cards=2) == REAL_CARD.address
    assert _opened(OldPyxrt(REAL_CARD.address), REAL_CARD, num_cards=2).number == REAL_CARD.number
    with pytest.raises(DeviceError, match=r"opened card 0000:5e:00\.1 for the card 0000:3d:00\.1"):
        _opened(OldPyxrt("0000:5e:00.1"), REAL_CARD, num_cards=2)


def test_a_pyxrt_that_does_not_tell_addresses() -> None:
    """Without addresses the only card is opened, but one of several is refused, as it might be any."""
    assert _opened(OldPyxrt(None), REAL_CARD, num_cards=1).number == REAL_CARD.number
    with pytest.raises(DeviceError, match=r"which of 2 cards.*binding='native'"):
        _opened(OldPyxrt(None), REAL_CARD, num_cards=2)
