"""Ranks in separate processes agree on what one finds out about a card, and share cards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from hls.description import SMARTSSD
from hls.xclbin import xclbin
from lightning_smartinfinity import SmartInfinityError, SmartSSDConfig, TransferConfig
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.update_device import choose_update_device
from tests.helpers.models import Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.runif import RunIf
from tests.training import worker
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

FIRST_MASTER = 1
"""Index of the pointer of ``sgd_update`` to the master weights."""
CARD_MIB = 4
# 4096 elements of state, of gradients in fp32, as micro-batches are accumulated, and of parameters in 16 bit, each in
# whole blocks of 4 KiB; and a block for the status.
BUFFER_BYTES = (48 + 16 + 8 + 4) * 1024


def choose(folder: Path) -> list[list[str | int]]:
    """Choose, for "smartssd" and for "auto", first while rank 1's card computes wrongly, then while nothing is wrong.

    Each outcome is who updates and how many processes share a card, or the error; then how many runs this rank's card
    had.
    """
    cards, outcomes = EmulatedCards(build()), []
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for wanted, failing in (("smartssd", True), ("smartssd", False), ("auto", True), ("auto", False)):
        cards.reset()
        if failing and rank == 1:
            cards.inject("corrupt", card=rank, skipped=1, pointer=FIRST_MASTER, bit=64 * 32)
        settings = OffloadSettings(
            storage=(folder / f"disk{rank}",),
            transfer=TransferConfig(num_buffers=2),
            update_device=wanted,
            smartssd=SmartSSDConfig(xclbin=cards.build.xclbin, devices=[rank]),
        )
        try:
            plan = choose_update_device(settings, optimizer="SGD").cards
            found: list[str | int] = ["host"] if plan is None else [plan.cards[0].address, plan.sharers]
        except SmartInfinityError as error:
            found = [f"{type(error).__name__}: {error}"]
        outcomes.append([*found, cards.counter("runs_completed", rank)])
    dist.destroy_process_group()
    return outcomes


def test_a_card_of_one_rank_fails_its_self_test(tmp_path: Path, emulated_cards_of_process: EmulatedCards) -> None:
    """If one rank's card fails, both raise or both update on their hosts; otherwise each has all of its own card."""
    for rank, (raised, chosen, left, taken) in enumerate(on_ranks(choose, tmp_path)):
        assert raised[0].startswith("DeviceError: sgd_update of the emulated card 1 computes other bits than the host")
        assert left[0] == "host"
        assert chosen == taken == [str(rank), 1, 9]


def train(folder: Path) -> dict[str, Any]:
    """Train on the host and then on two small cards, which both ranks use; return losses, masters and memory in use."""
    cards, card_bytes = EmulatedCards(build()), list[int]()
    cards.reset()
    recipe = Recipe(
        groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4, accumulate=2, precision="bf16-mixed"
    )
    found: dict[str, Any] = {"card_bytes": card_bytes}
    for device in ("host", "smartssd"):
        run = worker.Run(
            out=str(folder / device),
            recipe=recipe,
            devices=2,
            storage=[str(folder / device / "a"), str(folder / device / "b")],
            transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 30},
            options={
                "update_device": device,
                "smartssd": SmartSSDConfig(xclbin=folder / "small.xclbin") if device == "smartssd" else None,
            },
        )
        card_bytes.clear()
        look = LambdaCallback(
            on_train_end=lambda *_: card_bytes.extend(cards.counter("card_bytes", card) for card in range(2))
        )
        module, _, recorder = worker.train(run, look)
        found[device] = module.losses, recorder.masters
    return found


@pytest.mark.usefixtures("emulated_cards_of_process")
def test_two_processes_share_a_card(tmp_path: Path) -> None:
    """Each process takes half of the memory of both cards, and no more; the result is the host's."""
    bank = dataclasses.replace(SMARTSSD.platform.bank, size_bytes=CARD_MIB << 20)
    small = dataclasses.replace(SMARTSSD, platform=dataclasses.replace(SMARTSSD.platform, bank=bank))
    (tmp_path / "small.xclbin").write_bytes(xclbin(small))
    share = (CARD_MIB << 20) * 7 // 8 // 2
    for found in on_ranks(train, tmp_path):
        (losses, masters), (expected_losses, expected) = found["smartssd"], found["host"]
        assert losses == expected_losses and masters.keys() == expected.keys() != set()
        assert all(torch.equal(masters[name], expected[name]) for name in expected)
        assert found["card_bytes"] == 2 * [share // BUFFER_BYTES * BUFFER_BYTES]
