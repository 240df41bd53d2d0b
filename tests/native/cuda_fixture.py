"""The fixture of tests that run on the fake CUDA driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.helpers.native_testing import use_cuda_library
from tests.native.fake_cuda import FakeCuda, build

__all__ = ["fake_cuda"]


@pytest.fixture
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCuda]:
    """The fake driver, which the core opens instead of libcuda."""
    folder = tmp_path_factory.getbasetemp() / "fake-cuda"
    if not folder.exists():
        folder.mkdir()
        build(folder)
    library = folder / "libfakecuda.so"
    use_cuda_library(str(library))
    fake = FakeCuda(library)
    fake.reset()
    yield fake
    gc.collect()
    fake.reset()
    use_cuda_library(None)
    assert not fake.unmapped
