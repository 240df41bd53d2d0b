"""Gradients with everything offloaded are those of autograd alone, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.activations.models import MODELS, gradients, opened

DELAYS = [{}, {"max_delay_us": 2000}, {"max_delay_us": 300, "short_transfer_every": 3}]


def assert_same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert [list(step) for step in found] == [list(step) for step in expected]
    for one, other in zip(found, expected, strict=True):
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("faults", DELAYS)
@pytest.mark.parametrize("name", MODELS)
def test_everything_offloaded(tmp_path: Path, name: str, faults: dict[str, int]) -> None:
    """However long storage takes, gradients are the same, in every repetition."""
    expected = gradients(name)
    for seed in range(4):
        with opened(tmp_path, faults=faults | {"seed": seed}) as activations:
            assert_same(gradients(name, activations), expected)
            assert activations.traffic().offloaded_bytes > 0
