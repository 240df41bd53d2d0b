from __future__ import annotations

from tests.hls.conftest import sequential
from tests.native.cuda_fixture import fake_cuda
from tests.xrt.fixtures import emulated_cards, emulated_cards_of_process, hold, pyxrt

__all__ = ["emulated_cards", "emulated_cards_of_process", "fake_cuda", "hold", "pyxrt", "sequential"]
