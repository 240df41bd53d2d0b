"""The fixture of tests that run on the fake CUDA driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.native_testing import use_cuda_library
from tests.native.builds import built_once
from tests.native.fake_cuda import FakeCuda


@pytest.fixture
def fake_cuda() -> Iterator[FakeCuda]:
    """The fake driver, which the core opens instead of libcuda."""
    library = built_once("libfakecuda.so", Path(__file__).with_name("fake_cuda.cpp"), options=("-O1",))
    use_cuda_library(str(library))
    fake = FakeCuda(library)
    fake.reset()
    yield fake
    gc.collect()
    fake.reset()
    use_cuda_library(None)
    assert not fake.unmapped
