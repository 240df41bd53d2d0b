"""The emulated card is built from the kernels, before the tests of cards ask for it in several processes at once."""

from __future__ import annotations

import pytest

from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_TEST_LIMIT
from tests.xrt.builds import build

pytestmark = [RunIf(xrt=True), pytest.mark.timeout(BUILD_TEST_LIMIT)]


def test_the_build_is_whole() -> None:
    """The driver, the kernels and the files for XRT are there."""
    made = build()
    files = (made.driver, made.kernels, made.xclbin, made.probe_xclbin, made.ini)
    assert [file for file in files if not file.stat().st_size] == []
