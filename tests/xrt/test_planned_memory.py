"""Host memory that is predicted for cards is what their rings hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_smartinfinity.planning.memory import host_bytes
from lightning_smartinfinity.planning.simulator.handler import Route
from tests.helpers.card_runs import cards
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Run
from tests.planning.test_memory import CASE, DENSE
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards


@RunIf(xrt=True)
@pytest.mark.parametrize("route", [Route.HOST, Route.STORAGE])
def test_on_cards(emulated_cards: EmulatedCards, tmp_path: Path, route: Route) -> None:
    """The prediction equals the host's ring for cards and its gradients that wait to be sent, by either route."""
    case = CASE.but(num_devices=2)
    run = Run(tmp_path, case, device=cards(build().xclbin, gradient_route=route.value))
    held = {"ring": run.handler.ring_bytes, "gradient_arena": run.arena.buffer.nbytes}
    assert host_bytes(DENSE, arena_item_bytes=4, num_cards=2, route=route) == held
