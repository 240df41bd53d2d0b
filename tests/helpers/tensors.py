"""Comparison of named tensors bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["assert_equal", "bits", "differing"]


def assert_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that both have the same names, and equal tensors bit for bit."""
    assert differing(actual, expected) == []


def differing(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names that only one has, or whose tensors differ in a bit, in shape or in the size of a value."""
    common = actual.keys() & expected.keys()
    same = (name for name in common if torch.equal(bits(actual[name]), bits(expected[name])))
    return sorted((actual.keys() | expected.keys()).difference(same))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, so that NaNs and signs of zeros are compared too."""
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)  # a scalar, too
