"""Tests a card before it receives state: P2P in both directions, and every kernel bit for bit against the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.discovery.card_setup import CardSetup
from lightning_smartinfinity.devices.smartssd.discovery.cards import Card
from lightning_smartinfinity.devices.smartssd.kernels import Kernel
from lightning_smartinfinity.devices.smartssd.opening import SELF_TEST_ADVICE, card_errors, memory_group, open_card
from lightning_smartinfinity.devices.smartssd.scratch import Scratch, scratch_folder
from lightning_smartinfinity.devices.smartssd.unreturned import close_or_keep
from lightning_smartinfinity.errors import DeviceError
from lightning_smartinfinity.storage.extents import extent_bytes
from lightning_smartinfinity.storage.io.os_errors import in_milliseconds

__all__ = ["Bandwidth", "check_kernel", "check_p2p", "self_test"]

# Neither the first nor the last updated element is at the border of a beat, a group or a block.
_NUMEL = 5_003
_FIRST, _LAST = 37, 4_801
_P2P_BYTES = 1 << 20
_IDENTITY = native.Identity(job=bytes(16), rank=0, state_format=0)
_DAMAGED = f"Do not use it: look into the kernel log, and use update_device='host'.{SELF_TEST_ADVICE}"
_NO_P2P = (
    "Check that P2P is enabled and the IOMMU off or in pass-through mode. Look into the kernel log for the SSD."
    f"{SELF_TEST_ADVICE}"
)


class Bandwidth(NamedTuple):
    """Bandwidth between a card's SSD and its memory.

    Args:
        read: Bytes per second from the SSD.
        write: Bytes per second to the SSD.
    """

    read: float
    write: float


def self_test(setup: CardSetup, folders: Sequence[Path], kernels: Sequence[Kernel]) -> None:
    """Check every card of a setup with the folder on its SSD, and leave no files there.

    Args:
        setup: The cards.
        folders: Storage folders, which need not exist yet.
        kernels: Kernels that will be used.

    Raises:
        DeviceError: A check of a card fails.
        StorageError: A file on a card's SSD cannot be created, read or written.
    """
    for card, folder in zip(setup.cards, folders, strict=True):
        with scratch_folder(card, folder) as scratch:
            check_p2p(setup, card, scratch)
            for kernel in kernels:
                check_kernel(setup, card, kernel, scratch)


def check_p2p(setup: CardSetup, card: Card, scratch: Scratch, *, nbytes: int = _P2P_BYTES) -> Bandwidth:
    """Read a file into the card's memory and write it from there to another file.

    Args:
        setup: The setup, which describes how cards are opened.
        card: Card to check.
        scratch: A folder on the card's SSD.
        nbytes: Bytes to move, a multiple of 4096.

    Raises:
        DeviceError: The card fails, or the bytes written differ from those read.
        StorageError: A file cannot be created.
    """
    pattern = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    scratch.fill(_SOURCE, pattern)
    scratch.fill(_TARGET, np.zeros(nbytes, np.uint8))
    with card_errors(card):
        opened = open_card(setup, card)
        try:
            buffer = opened.allocate(nbytes, group=memory_group(setup, opened), p2p=True)
            bandwidth = _through(card, buffer, scratch, timeout_ms=in_milliseconds(setup.settings.timeout))
        finally:
            opened.close()
    if scratch.read(_TARGET) != pattern.tobytes():
        raise DeviceError(f"What the {card.label} wrote to its SSD by P2P is not what it read from it.", _DAMAGED)
    return bandwidth


_SOURCE, _TARGET = "p2p-in", "p2p-out"


def _through(card: Card, buffer: native.CardBuffer, scratch: Scratch, *, timeout_ms: int) -> Bandwidth:
    queue = buffer.queue(timeout_ms=timeout_ms)
    try:
        seconds = []
        for name, transfer in ((_SOURCE, queue.read), (_TARGET, queue.write)):
            file = scratch.open(name)
            begin = time.perf_counter()
            failure = queue.wait(transfer(file, offset=0, address=buffer.address, nbytes=buffer.nbytes))
            seconds.append(time.perf_counter() - begin)
            file.close()
            if failure is not None:
                raise DeviceError(
                    f"P2P between the {card.label} and its SSD failed: {scratch.shortened(failure.message)}.",
                    _NO_P2P,
                )
    finally:
        close_or_keep(queue, card)
    return Bandwidth(*(buffer.nbytes / max(passed, 1e-9) for passed in seconds))


def check_kernel(setup: CardSetup, card: Card, kernel: Kernel, scratch: Scratch) -> None:
    """Update a tasklet of each type on the card and on the host, and compare state and parameters bit for bit.

    Args:
        setup: The setup, which describes how cards are opened.
        card: Card to check.
        kernel: Kernel to run.
        scratch: A folder on the card's SSD.

    Raises:
        DeviceError: The card fails, or its result differs from the host's.
        StorageError: A file cannot be created, read or written.
    """
    with card_errors(card):
        opened = open_card(setup, card)
        try:
            options = native.CardOptions(
                card=opened,
                kernel=kernel.name,
                gradient_buffer_bytes=_NUMEL * _MOST_ITEM_BYTES,
                parameter_bytes=_NUMEL * _MOST_ITEM_BYTES,
                timeout_ms=in_milliseconds(setup.settings.timeout),
            )
            different = [
                dtype.name.lower()
                for dtype in _DTYPES
                if (tile := _Tile(kernel, dtype)).updated(scratch, "card", card=options)
                != tile.updated(scratch, "host", card=None)
            ]
        finally:
            opened.close()
    if different:
        raise DeviceError(
            f"{kernel.name} of the {card.label} computes other bits than the host"
            f" (gradients and parameters in {', '.join(different)}).",
            _DAMAGED,
        )


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return bfloat16 bits of the values, truncated; the test does not depend on the rounding."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


_DTYPES: dict[native.DType, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
    native.DType.FLOAT32: lambda values: values,
    native.DType.BFLOAT16: _bfloat16,
    native.DType.FLOAT16: lambda values: values.astype(np.float16),
}
"""Each type that gradients and parameters may have in training, and how to convert the test's values to it."""

_MOST_ITEM_BYTES = 4


class _Tile:
    """A tasklet with reproducible initial state and gradient; the state contains subnormal numbers.

    Args:
        kernel: Kernel that updates it.
        dtype: Type of gradient and parameters.
    """

    def __init__(self, kernel: Kernel, dtype: native.DType) -> None:
        self._kernel = kernel
        self._dtype = dtype
        self._nbytes = extent_bytes(_NUMEL, kernel.num_arrays)
        generator = np.random.default_rng(1)
        self._arrays = [np.abs(generator.standard_normal(_NUMEL, np.float32)) for _ in range(kernel.num_arrays)]
        # Subnormal numbers: a kernel that replaces them by zero fails the test.
        self._arrays[-1][::7] = np.float32(1e-40)
        self._gradient = _DTYPES[dtype](generator.standard_normal(_NUMEL, np.float32))

    def updated(self, scratch: Scratch, name: str, *, card: native.CardOptions | None) -> tuple[bytes, bytes]:
        """Return the extent and the parameters after one step.

        Args:
            scratch: Folder for the state file.
            name: Name of the state file to create.
            card: Card that updates; ``None`` means the host.
        """
        scratch.fill(name, np.zeros(2 * self._nbytes, np.uint8))
        parameters = np.zeros_like(self._gradient)
        addresses = [array.ctypes.data for array in self._arrays]
        first = native.Segment(offset=0, numel=_NUMEL, arrays=addresses)
        self._work(scratch, name, native.Batch(native.Operation.WRITE, [self._tasklet([first])]), card=None)
        step = native.Segment(
            offset=_FIRST,
            numel=_LAST - _FIRST,
            step=0,
            gradient=_at(self._gradient, _FIRST),
            gradient_dtype=self._dtype,
            parameter=_at(parameters, _FIRST),
            parameter_dtype=self._dtype,
        )
        steps = [self._kernel.example()]
        self._work(scratch, name, native.Batch(native.Operation.UPDATE, [self._tasklet([step])], steps), card=card)
        return scratch.read(name)[self._nbytes :], parameters.tobytes()

    def _tasklet(self, segments: list[native.Segment]) -> native.Tasklet:
        """Make a tasklet: an update reads the first place and writes the second; a plain write goes to the first."""
        writes_alone = bool(segments[0].arrays)
        return native.Tasklet(
            index=0,
            numel=_NUMEL,
            num_arrays=self._kernel.num_arrays,
            extent_bytes=self._nbytes,
            read_file=0,
            read_offset=0,
            read_generation=0,
            write_file=0,
            write_offset=0 if writes_alone else self._nbytes,
            write_generation=0 if writes_alone else 1,
            segments=segments,
        )

    def _work(self, scratch: Scratch, name: str, batch: native.Batch, *, card: native.CardOptions | None) -> None:
        file = scratch.open(name)
        pipeline = native.Pipeline(
            files=[file], identity=_IDENTITY, num_buffers=2, buffer_bytes=self._nbytes, io_engine="threads", card=card
        )
        try:
            pipeline.submit(batch)
            failure = pipeline.finish()
        finally:
            pipeline.stop()
            close_or_keep(pipeline, scratch.card)
            file.close()
        if failure is not None:
            raise scratch.error_of(failure)


def _at(array: NDArray[Any], element: int) -> int:
    return int(array.ctypes.data) + element * array.itemsize
