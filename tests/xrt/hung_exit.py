"""Leaves a run hanging, of a pipeline that is closed or not, and ends; arguments: xclbin, folder, closed or open."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.helpers.card_runs import cards
from tests.transfer.harness import Case, Run
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

emulated_cards = EmulatedCards(build())
run = Run(Path(sys.argv[2]), Case(dtype=torch.bfloat16), device=cards(Path(sys.argv[1]), timeout=0.03))
emulated_cards.inject("hang")
run.step(0)
if sys.argv[3] == "closed":
    run.close()
print("left hanging")
