"""Repeats the core of the device's tests through the pyxrt binding, with every call of XRT going through Python."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from lightning_smartinfinity.devices.smartssd.pyxrt_binding import PyxrtBinding
from tests.helpers import card_runs
from tests.helpers.runif import RunIf
from tests.pipeline.harness import Case, running
from tests.xrt.cards import EmulatedCards
from tests.xrt.test_device import (
    test_an_incremental_step,
    test_five_steps,
    test_gradients_through_the_cards_storage,
    test_rollback_and_outside_changes,
    test_staged_parameters,
    test_traffic_of_a_step,
)
from tests.xrt.test_device_failures import (
    log,
    test_both_cards_in_an_incremental_step,
    test_close_with_a_hung_run,
    test_late_completion,
    test_p2p_that_fails,
)
from tests.xrt.test_device_refusals import (
    test_no_such_card_kernel_or_file,
    test_p2p_that_is_off,
    test_too_little_memory,
)

__all__ = [
    "log",
    "test_an_incremental_step",
    "test_both_cards_in_an_incremental_step",
    "test_close_with_a_hung_run",
    "test_five_steps",
    "test_gradients_through_the_cards_storage",
    "test_late_completion",
    "test_no_such_card_kernel_or_file",
    "test_p2p_that_fails",
    "test_p2p_that_is_off",
    "test_rollback_and_outside_changes",
    "test_staged_parameters",
    "test_too_little_memory",
    "test_traffic_of_a_step",
]

pytestmark = RunIf(xrt=True)


@pytest.fixture(autouse=True)
def _through_pyxrt(pyxrt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open all cards through Python."""
    monkeypatch.setattr(card_runs, "setup_of", partial(card_runs.setup_of, binding="pyxrt"))


def test_the_binding_is_python(tmp_path: Path, emulated_cards: EmulatedCards, pyxrt: ModuleType) -> None:
    """Pyxrt starts every run of a kernel, as all of these tests assume."""
    with (
        mock.patch.object(PyxrtBinding, "start", autospec=True, side_effect=PyxrtBinding.start) as start,
        running(tmp_path, Case(num_devices=2), device=card_runs.cards(emulated_cards.build.xclbin)) as run,
    ):
        emulated_cards.reset()
        start.reset_mock()
        run.step(0)
        runs = [emulated_cards.counter("runs_begun", card) for card in range(2)]
        assert all(runs) and start.call_count == sum(runs)
        assert all(isinstance(call.args[1], pyxrt.run) for call in start.call_args_list)
        assert "XRT by pyxrt" in run.device.description
