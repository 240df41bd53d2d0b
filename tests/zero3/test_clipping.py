"""Clipping returns the gradient norm to the user as torch does."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_smartinfinity.zero3.optimizer.clipping import norm_as_torch


def test_a_norm_is_returned_as_torch_does() -> None:
    """The norm is a tensor without dimensions, equal to the one that torch's own clipping returns."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(
        norm_as_torch(5.0, error_if_nonfinite=True), torch.nn.utils.clip_grad_norm_(parameter, 9)
    )


def test_a_norm_that_is_not_finite() -> None:
    """A norm that is not finite is returned, or raises an error if the user asks for one."""
    assert norm_as_torch(math.nan, error_if_nonfinite=False).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        norm_as_torch(math.nan, error_if_nonfinite=True)
