"""Precisions that the strategy takes, and those that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_smartinfinity import ConfigError, SmartInfinityPrecision


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("bf16-mixed", torch.bfloat16),
        ("16-true", torch.float16),
        ("16-mixed", torch.float16),
    ],
)
def test_inputs_are_cast_to_the_dtype_of_the_precision(precision: Any, dtype: torch.dtype) -> None:
    """Every precision of the documents is taken."""
    assert SmartInfinityPrecision(precision).convert_input(torch.ones(1)).dtype == dtype


@pytest.mark.parametrize("precision", ["64-true", "bf16", 16, None])
def test_other_precisions_are_refused(precision: Any) -> None:
    """The message names the value and lists what can be written instead."""
    with pytest.raises(ConfigError) as caught:
        SmartInfinityPrecision(precision)
    assert repr(precision) in caught.value.problem
    assert "'bf16-mixed'" in caught.value.remedy
