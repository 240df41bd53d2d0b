from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.native_testing import InstructionSet, select_instruction_set, supported_instruction_sets
from tests.native.cuda_fixture import fake_cuda

__all__ = ["fake_cuda"]


@pytest.fixture(autouse=True)
def _best_instruction_set() -> Iterator[None]:
    """Reset the choice of the instruction set after each test."""
    yield
    select_instruction_set(None)


@pytest.fixture(params=supported_instruction_sets(), ids=lambda choice: choice.name.lower())
def instruction_set(request: pytest.FixtureRequest) -> InstructionSet:
    """Select each instruction set of this CPU in turn."""
    return select_instruction_set(request.param)
