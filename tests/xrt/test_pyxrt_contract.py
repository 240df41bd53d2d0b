"""pyxrt, the system's or ours, has the names, overloads and enum values of XRT 2.13, and its traps."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.helpers.runif import RunIf
from tests.xrt.cards import EmulatedCards
from tests.xrt.pyxrt.signatures import expected, signatures

pytestmark = RunIf(xrt=True)

NUMEL_ARGUMENT = 7  # of sgd_update, behind its pointers


def test_signatures(pyxrt: ModuleType) -> None:
    """Overloads agree in types, order and number of arguments, and enumerators in names and values.

    Nothing is newer than 2.13, because a test could come to rely on it.
    """
    assert signatures(pyxrt) == expected()


def test_a_float_or_a_word_beyond_int_is_refused(pyxrt: ModuleType, emulated_cards: EmulatedCards) -> None:
    """Floats and words beyond a C int are refused; a word with its highest bit set has to be passed as negative.

    A numpy float is taken, and truncated.
    """
    device = pyxrt.device(0)
    uuid = device.load_xclbin(str(emulated_cards.build.xclbin))
    run = pyxrt.run(pyxrt.kernel(device, uuid, "sgd_update", pyxrt.kernel.shared))
    for value in (0.5, np.float64(0.5), 2**31, -(2**31) - 1):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            run.set_arg(NUMEL_ARGUMENT, value)
    for value in (-(2**31), np.float32(3.9)):
        run.set_arg(NUMEL_ARGUMENT, value)


def test_a_map_does_not_keep_its_buffer(pyxrt: ModuleType, emulated_cards: EmulatedCards, tmp_path: Path) -> None:
    """A buffer's memory is freed with the last reference to the buffer, even while a view exists: hold both.

    The view is memory that `os.preadv` fills in part.
    """
    path = tmp_path / "file"
    path.write_bytes(np.arange(1024, dtype=np.float32).tobytes())
    device = pyxrt.device(0)
    device.load_xclbin(str(emulated_cards.build.xclbin))
    buffer = pyxrt.bo(device, 2 * 4096, pyxrt.bo.p2p, 0)
    view, before = buffer.map(), emulated_cards.counter("num_buffers")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.preadv(descriptor, [view[4096:]], 0) == 4096
    finally:
        os.close(descriptor)
    assert (np.frombuffer(view, np.float32)[1024:] == np.arange(1024)).all()
    del buffer
    assert emulated_cards.counter("num_buffers") == before - 1
    assert len(view) == 2 * 4096
