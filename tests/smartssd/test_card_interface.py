"""The package's kernels are those that ``hls/description.py`` describes.

``tests/hls`` shows that the kernels follow the same description, ``tests/xrt`` that the native core calls them so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hls.description import KERNELS
from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.devices.smartssd import kernels as of_package
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.pipeline.rules import rule_for
from tests.helpers.golden import ARRAYS
from tests.helpers.golden import RULES as RULE_OF
from tests.native.stored import Array

STEPS = {rule.kernel: getattr(native, rule.step) for rule in RULES}


def test_an_optimizer_without_a_kernel() -> None:
    """An optimizer without a kernel is refused by name, with a list of those that have one."""
    with pytest.raises(UnsupportedError, match=r"torch\.optim\.Adamax") as caught:
        of_package.kernel_of("Adamax")
    assert "update_device='host'" in caught.value.remedy and "Adagrad" in caught.value.remedy


def example_state(step: Any) -> tuple[Array, ...]:
    """Return the self-test's state after a step.

    It must be finite, since a card's NaN may have other bits than the host's.
    """
    gradient, *state = np.random.default_rng(1).standard_normal((1 + len(ARRAYS[type(step)]), 50_000), np.float32)
    return RULE_OF[type(step)](step, gradient, tuple(map(np.abs, state)))


def test_kernels_of_the_package() -> None:
    """The package's kernels agree with the description in names, arrays and steps, and with torch's optimizers."""
    assert [kernel.name for kernel in of_package.KERNELS] == [kernel.name for kernel in KERNELS]
    for ours, described in zip(of_package.KERNELS, KERNELS, strict=True):
        assert ours.num_arrays == len(described.arrays)
        example = ours.example()
        assert type(example) is STEPS[described.name]
        assert all(getattr(example, word) != 0 for word in described.words)
        assert all(np.isfinite(array).all() for array in example_state(example))
        for optimizer in ours.rule.optimizers:
            rule = rule_for(getattr(torch.optim, optimizer)([torch.nn.Parameter(torch.zeros(1))]))
            assert rule.name == optimizer and tuple(rule.arrays) == described.arrays
