"""Gradients with everything offloaded are those of autograd alone, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from tests.activations.models import MODELS, everything, gradients, opened

DELAYS = {"max_delay_us": 300, "short_transfer_every": 3}
ROOMY, TIGHT = everything(), everything(host_bytes=16 * 1024, budget_bytes=32 * 1024)


def assert_same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert [list(step) for step in found] == [list(step) for step in expected]
    for one, other in zip(found, expected, strict=True):
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("name", MODELS)
def test_everything_offloaded(tmp_path: Path, name: str, settings: ActivationOffload) -> None:
    """From a pool that holds everything and from storage, gradients are the same in every repetition."""
    expected = gradients(name)
    for seed in range(3):
        with opened(tmp_path, settings, faults=DELAYS | {"seed": seed}) as activations:
            assert_same(gradients(name, activations), expected)
            traffic = activations.traffic()
            assert traffic.offloaded_bytes > 0
            assert settings is ROOMY or "checkpoints" in name or traffic.read_bytes > 0


@pytest.mark.parametrize("verify", [True, False])
def test_automatic_settings(tmp_path: Path, verify: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With what is chosen from a measurement, gradients are the same, in the step that is measured and later.

    One line of the log tells what was chosen.
    """
    caplog.set_level("INFO", logger="lightning_smartinfinity.activations")
    expected = gradients("dropout", steps=4)
    with opened(tmp_path, ActivationOffload(min_bytes=64, verify=verify)) as activations:
        assert_same(gradients("dropout", activations, steps=4), expected)
        choice = activations.choice
        assert choice is not None and choice.offloaded_bytes + choice.kept_bytes > 0
    told = [record.getMessage() for record in caplog.records if "that forward saves" in record.getMessage()]
    assert told and "MB are kept" in told[0] and "storage was seen to write" in told[0]
