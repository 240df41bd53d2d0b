"""SmartSSDDevice under a transfer handler, through real XRT on emulated cards: bit for bit what the host computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.card_runs import OPTIMIZERS, cards, same_as_host, settled_host
from tests.helpers.runif import RunIf
from tests.transfer.harness import Case, running
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_five_steps(tmp_path: Path, emulated_cards: EmulatedCards, optimizer: str, dtype: torch.dtype) -> None:
    """Two cards, groups that meet in tasklets, parameters without gradient: state files are the host's, to the byte."""
    case = Case(dtype=dtype, num_devices=2, **OPTIMIZERS[optimizer])
    device = cards(emulated_cards.build.xclbin)
    with (
        running(tmp_path / "card", case, device=device) as run,
        running(tmp_path / "host", case, device=settled_host) as host,
    ):
        for step in range(5):
            run.step(step)
            host.step(step)
        same_as_host(run, host)
    assert all(emulated_cards.counter("runs_completed", card) for card in range(2))
