"""A tensor store's files grow and shrink while its disk does not answer: everything else goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from lightning_smartinfinity.native import TensorExtent
from tests.helpers.native_testing import Hold
from tests.helpers.waiting import await_that, join
from tests.native.test_tensor_store import BLOCK, STEP, Setup, setup

__all__ = ["setup"]


def started(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def lengths(setup: Setup) -> int:
    return sum(path.stat().st_size for path in setup.paths)


def test_everything_else_goes_on_while_a_file_grows(setup: Setup) -> None:
    """Extents are read, written, allocated and freed meanwhile, and the store tells its sizes."""
    (kept, values), _in_the_other_file = setup.written(BLOCK, seed=1), setup.written(BLOCK, seed=3)
    hold, grown = Hold.of_resizing(setup.store), list[TensorExtent]()
    before = setup.store.file_bytes
    growing = [started(lambda: grown.append(setup.store.allocate(3 * STEP))) for _ in range(3)]
    await_that(lambda: hold.count > 0)
    found: list[object] = []
    join(started(lambda: found.append(setup.found(kept))))  # without Python's lock: if it waits, the test can tell
    np.testing.assert_array_equal(found[0], values)
    assert setup.store.taken_bytes == 2 * BLOCK and setup.store.file_bytes == before == lengths(setup)
    written: list[TensorExtent] = []
    join(started(lambda: written.append(setup.store.allocate(2 * BLOCK))))
    np.testing.assert_array_equal(setup.found(written[0]), np.zeros(2 * BLOCK, np.uint8))
    written.clear()
    assert setup.store.taken_bytes == 2 * BLOCK and not grown
    hold.release()
    join(*growing)
    assert setup.store.taken_bytes == 2 * BLOCK + 3 * 3 * STEP and setup.store.file_bytes == lengths(setup)
    spans = sorted((extent.path, extent.offset) for extent in grown)
    assert len(set(spans)) == 3


def test_an_extent_is_freed_while_the_disk_does_not_answer(setup: Setup) -> None:
    """Who drops the last reference waits for nothing; an allocation that needs the file longer waits for its end."""
    kept, values = setup.written(BLOCK, seed=1)
    extents = [setup.store.allocate(8 * STEP) for _ in range(2)]
    before, hold = lengths(setup), Hold.of_resizing(setup.store)
    join(started(extents.clear))
    await_that(lambda: hold.count == 2)
    assert setup.store.taken_bytes == BLOCK and lengths(setup) == before
    np.testing.assert_array_equal(setup.found(kept), values)
    large: list[TensorExtent] = []
    growing = started(lambda: large.append(setup.store.allocate(16 * STEP)))
    hold.release()
    join(growing)
    assert large[0].nbytes == 16 * STEP
    del large[:]
    await_that(lambda: setup.store.file_bytes == lengths(setup) <= 4 * STEP)


def test_a_store_is_closed_while_a_file_grows(setup: Setup) -> None:
    """close() returns; whoever waits for the file gets an error once the disk answers."""
    hold, errors = Hold.of_resizing(setup.store), list[Exception]()

    def grow() -> None:
        try:
            for _ in range(4):
                setup.store.allocate(3 * STEP)
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    growing = [started(grow) for _ in range(4)]
    await_that(lambda: hold.count > 0)
    join(started(setup.store.close))
    hold.release()
    join(*growing)
    assert len(errors) == 4 and all("closed" in str(error) for error in errors)
