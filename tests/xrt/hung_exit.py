"""Exits while something hangs, after others that hung and were released; arguments: xclbin, folder, fault."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd import unreturned
from lightning_smartinfinity.devices.smartssd.discovery.cards import emulated_card
from tests.helpers.card_runs import cards
from tests.helpers.native_testing import Hold
from tests.helpers.waiting import await_that, lenient
from tests.pipeline.harness import Case, Run
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards


def leave_p2p_behind(xclbin: Path, folder: Path) -> None:
    """Leave a P2P buffer behind as the self-test does, with a read that is never released."""
    path = folder / "file"
    path.write_bytes(bytes(1 << 20))
    card = native.Card.open(0, xclbin=str(xclbin))
    buffer = card.allocate(1 << 20, group=card.group("adamw_update", 0), p2p=True)
    queue = buffer.queue(timeout_ms=30)
    Hold(queue, read_at=0)
    ticket = queue.read(native.StateFile(str(path), direct=True), offset=0, address=buffer.address, nbytes=1 << 20)
    failure = queue.wait(ticket)
    assert failure is not None and failure.kind == "device" and queue.busy
    unreturned.close_or_keep(queue, emulated_card(0))
    card.close()


EVENTS = {"hang": "run-hung", "stall": "sync-stalled"}

fault = sys.argv[3]
emulated_cards = EmulatedCards(build())
if fault == "p2p":
    leave_p2p_behind(Path(sys.argv[1]), Path(sys.argv[2]))
for number in range(0 if fault == "p2p" else 3):
    if number > 0:
        emulated_cards.wait_for(EVENTS[fault], count=number)
        emulated_cards.release()
        await_that(unreturned.close_returned)
    emulated_cards.inject(fault)
    case = Case(dtype=torch.bfloat16)
    run = Run(Path(sys.argv[2]) / str(number), case, device=cards(Path(sys.argv[1]), timeout=lenient()))
    run.step(0)
    run.close()
print("left hanging")
