from __future__ import annotations

import pytest

from tests.hls.simulation import Library, built


@pytest.fixture(scope="session")
def sequential() -> Library:
    """The fast simulation of the kernels."""
    return Library(built("sequential"))
