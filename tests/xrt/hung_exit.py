"""Exits while something hangs, after others that hung and were released; arguments: xclbin, folder, fault."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lightning_smartinfinity.devices.smartssd import unreturned
from tests.helpers.card_runs import cards
from tests.helpers.waiting import await_that, lenient
from tests.pipeline.harness import Case, Run
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

EVENTS = {"hang": "run-hung", "stall": "sync-stalled"}

fault = sys.argv[3]
emulated_cards = EmulatedCards(build())
for number in range(3):
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
