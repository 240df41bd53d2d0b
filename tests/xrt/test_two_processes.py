"""Ranks in separate processes agree on what one finds out about a card, and share cards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from hls.description import SMARTSSD
from hls.xclbin import xclbin
from tests.helpers.models import Recipe
from tests.helpers.processes import run_module
from tests.helpers.runif import RunIf
from tests.training import worker
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

CARD_MIB = 4
# 4096 elements of state, of gradients in fp32, as micro-batches are accumulated, and of parameters in 16 bit, each in
# whole blocks of 4 KiB; and a block for the status.
BUFFER_BYTES = (48 + 16 + 8 + 4) * 1024


@pytest.fixture
def small_xclbin(tmp_path: Path) -> Path:
    """An xclbin for cards of little memory."""
    bank = dataclasses.replace(SMARTSSD.platform.bank, size_bytes=CARD_MIB << 20)
    path = tmp_path / "small.xclbin"
    path.write_bytes(xclbin(dataclasses.replace(SMARTSSD, platform=dataclasses.replace(SMARTSSD.platform, bank=bank))))
    return path


def test_a_card_of_one_rank_fails_its_self_test(tmp_path: Path, emulated_cards_of_process: EmulatedCards) -> None:
    """If one rank's card fails, both raise or both update on their hosts; otherwise each has all of its own card."""
    done = run_module("tests.xrt.agreement_worker", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-6000:]
    told = "sgd_update of the emulated card 1 computes other bits than the host"
    for rank in range(2):
        raised, chosen, left, taken = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert raised[0].startswith(f"DeviceError: {told}")
        assert left[0] == "host"
        assert chosen == taken == [str(rank), 1, 9]
    assert done.stderr.count(f"the host updates, since SmartSSDs cannot: {told}") == 2


def test_two_processes_share_a_card(
    emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_xclbin: Path
) -> None:
    """Each process takes half of the memory of both cards, and no more; the result is the host's."""
    monkeypatch.setenv("SMART_INFINITY_CARD_COUNT", "2")
    monkeypatch.setenv("SMART_INFINITY_XCLBIN", str(small_xclbin))
    recipe = Recipe(
        groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4, accumulate=2, precision="bf16-mixed"
    )
    host, cards = (
        worker.Run(
            out=str(tmp_path / device),
            recipe=recipe,
            devices=2,
            storage=[str(tmp_path / device / "a"), str(tmp_path / device / "b")],
            transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 30},
            options={"update_device": device},
        )
        for device in ("host", "smartssd")
    )
    expected, found = worker.launch(host, cards, worker="tests.xrt.sharing_worker")
    assert "is small for SmartSSDs" in found.output
    assert found.losses == expected.losses
    for name, master in expected.masters.items():
        assert torch.equal(found.masters[name], master), name
    share = (CARD_MIB << 20) * 7 // 8 // 2
    for rank in range(2):
        extra = json.loads((tmp_path / "smartssd" / f"losses-{rank}.json").read_text())
        assert extra["card_bytes"] == 2 * [share // BUFFER_BYTES * BUFFER_BYTES]
