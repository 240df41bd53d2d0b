"""Activations on the emulated device: orders, failures, and the tests of tests/gpu with delays from several seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulated_cuda.test_gpu_tests import assert_they_pass
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf

pytestmark = RunIf(torch_without_cuda=True)


def test_faults(tmp_path: Path) -> None:
    """All tests of activation_faults.py pass on the emulated device."""
    assert_they_pass("tests/emulated_cuda/activation_faults.py", tmp_path)


@pytest.mark.parametrize("seed", long_but([2], range(2, 8)))
def test_delays(tmp_path: Path, seed: int) -> None:
    """Whatever is late, gradients are those of autograd alone."""
    assert_they_pass("tests/gpu/test_activations.py", tmp_path, seed=seed)
