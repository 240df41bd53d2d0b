"""What keeps cards from being opened: the errors name the card and say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import DeviceError
from lightning_smartinfinity.storage.folders import direct
from tests.helpers.card_runs import cards, setup_of
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Case, Run, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)
CASE = Case(dtype=torch.bfloat16, num_devices=2, shapes=((9_000, 0, 0, 0), (6_000, 3, 1, 0), (7_000, 0, 0, 1)))


def test_too_little_memory(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """A ring that does not fit is refused with advice; on a shared card a smaller ring is chosen first."""
    emulated_cards.set("dram_mib", 1)
    with pytest.raises(DeviceError, match=r"TransferConfig\(tasklet_bytes"):
        Run(tmp_path / "a", CASE.but(num_buffers=64), device=cards(emulated_cards.build.xclbin))
    emulated_cards.set("dram_mib", 4096)
    bank = setup_of(1, emulated_cards.build.xclbin).xclbin.memory_bytes
    assert bank is not None
    sharers = bank // (1 << 20)
    with running(
        tmp_path / "b", CASE.but(num_buffers=64), device=cards(emulated_cards.build.xclbin, sharers=sharers)
    ) as run:
        run.step(0)
        assert 1 << 19 < emulated_cards.counter("card_bytes", 0) <= 1 << 20


def test_no_such_card_kernel_or_file(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """XRT's refusals become our errors, which name the card. Without P2P the SSD can reach no buffer."""
    build = emulated_cards.build
    for number, (path, changes, told) in enumerate(
        [
            (build.xclbin, {"num_devices": 3}, r"emulated card 2: .*XILINX_XRT"),
            (build.probe_xclbin, {}, r"emulated card 0: .*adamw_update.* of this version: make -C hls xclbin"),
            (tmp_path / "none", {}, r"emulated card 0: .*built for the card"),
        ]
    ):
        with pytest.raises(DeviceError, match=told):
            Run(tmp_path / str(number), CASE.but(**changes), device=cards(path))
    emulated_cards.set("p2p", 0)
    with pytest.raises(DeviceError, match="P2P"):
        Run(tmp_path / "p2p", CASE, device=cards(build.xclbin))


def test_files_in_the_page_cache(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in the page cache are refused: the card would read its SSD without what the host has written."""
    monkeypatch.setattr(direct, "choose_direct", lambda folder, name, choice: False)
    with pytest.raises(DeviceError, match=r"state\.bin.*page cache"):
        Run(tmp_path, CASE, device=cards(emulated_cards.build.xclbin))
