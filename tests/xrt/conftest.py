from __future__ import annotations

from tests.cli.conftest import cli
from tests.hls.conftest import sequential
from tests.native.cuda_fixture import fake_cuda
from tests.xrt.fixtures import emulated_cards, emulated_cards_of_process, hold, pyxrt

__all__ = ["cli", "emulated_cards", "emulated_cards_of_process", "fake_cuda", "hold", "pyxrt", "sequential"]
