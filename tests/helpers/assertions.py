"""Assertions that many tests share: named tensors are equal bit for bit, and an error of ours is raised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_smartinfinity import SmartInfinityError


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


def assert_helpful(error: SmartInfinityError, *values: str) -> None:
    """Assert that the message names the values at fault and ends in a remedy."""
    assert error.remedy.endswith("."), error
    for value in values:
        assert value in str(error), f"{value!r} is not named in: {error}"


@contextmanager
def refused(kind: Any, *values: str, match: str | None = None, remedy: str = "") -> Iterator[None]:
    """Assert that an error of ours is raised within, which names the values and has these words in its remedy."""
    with pytest.raises(kind, match=match) as caught:
        yield
    assert_helpful(caught.value, *values)
    assert remedy in caught.value.remedy
