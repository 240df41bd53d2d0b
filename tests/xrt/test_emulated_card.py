"""The emulated SmartSSD shows what a test would miss on a sound one: missing syncs and bad pointers.

Tests of the device count each kind of fault and find the same bits after it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity.devices.smartssd.discovery.cards import emulated_card
from lightning_smartinfinity.devices.smartssd.pyxrt_binding import PyxrtBinding
from tests.helpers.card_runs import setup_of
from tests.helpers.runif import RunIf
from tests.xrt.card_state import CardCase, card_state
from tests.xrt.cards import EmulatedCards
from tests.xrt.recovery import ARRAYS, NUMEL, STEP, fail, make_good

pytestmark = RunIf(xrt=True)

GRADIENT, PARAMETER = 0, 7  # pointers of adamw_update, in the order of its arguments
STATUS_BYTES = 64


class CarelessBinding(PyxrtBinding):
    """A binding that leaves out a sync, or passes another buffer.

    Attributes:
        unsynced: Direction of the sync that is left out, and whether it is that of the status.
        short: Which pointer gets a buffer of how many bytes.
        shifted: Which pointer gets the part of its buffer behind the first bytes.
    """

    unsynced: tuple[bool, bool] | None = None
    short: tuple[int, int] | None = None
    shifted: int | None = None

    def sync(self, buffer: Any, to_card: bool, nbytes: int, offset: int) -> None:
        if (to_card, nbytes == STATUS_BYTES) != self.unsynced:
            super().sync(buffer, to_card, nbytes, offset)

    def set_buffer(self, run: Any, index: int, buffer: Any) -> None:
        if self.short is not None and self.short[0] == index:
            buffer = self._kept = self.allocate(self.short[1], False, 0)
        if self.shifted == index:
            buffer = self._kept = self.part(buffer, 4 * NUMEL, 32)
        super().set_buffer(run, index, buffer)


@pytest.mark.parametrize(
    ("mistake", "told", "reason"),
    [
        ({"unsynced": (True, False)}, "the gradient arrived with another checksum", ""),
        ({"unsynced": (False, False)}, "the parameters arrived with another checksum", ""),
        ({"unsynced": (False, True)}, "there is no status of a kernel", ""),
        ({"short": (GRADIENT, 4096)}, "ended with ERROR", "pointer 0 .*past its buffer"),
        # It ends within a page.
        ({"short": (PARAMETER, 4 * NUMEL - 64)}, "ended with ERROR", "pointer 7 .*past its buffer"),
        ({"shifted": GRADIENT}, "ended with ERROR", "not 64-byte aligned"),
    ],
)
@pytest.mark.usefixtures("pyxrt")
def test_mistakes_of_a_driver(
    tmp_path: Path, emulated_cards: EmulatedCards, mistake: dict[str, Any], told: str, reason: str
) -> None:
    """Memory of host and card is apart and poisoned, and a beat outside of a pointer's buffer is an error."""
    binding = CarelessBinding(emulated_card(0), setup_of(1, emulated_cards.build.xclbin).xclbin, num_cards=1)
    with card_state(tmp_path, emulated_cards, STEP, NUMEL, CardCase(binding=binding)) as state:
        state.write(*ARRAYS)
        vars(binding).update(mistake)
        failure, parameter = fail(state)
        assert re.search(told, failure.message)
        assert re.search(reason, " ".join(emulated_cards.events("run-end")[-1].fields[3:]))
        make_good(state, parameter)
