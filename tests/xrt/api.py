"""Calls XRT's public C API by ctypes, as far as tests of the emulated card need it. Calls let other threads run."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.helpers.waiting import LIMIT

__all__ = ["Buffer", "Device", "Flags", "Run", "State", "XrtError"]


class Flags(IntEnum):
    """Kinds of buffer objects."""

    NORMAL = 0
    P2P = 1 << 30


class State(IntEnum):
    """States of a run."""

    NEW = 1
    QUEUED = 2
    RUNNING = 3
    COMPLETED = 4
    ERROR = 5
    ABORT = 6
    TIMEOUT = 8


class XrtError(OSError):
    """A call that failed, with its errno."""


class Device:
    """One card with an xclbin."""

    def __init__(self, index: int, xclbin: Path) -> None:
        self._xrt = _library()
        self.handle = _check(self._xrt.xrtDeviceOpen(index))
        self._uuid = ctypes.create_string_buffer(16)
        self._kernels: dict[str, int] = {}
        self.load(xclbin)

    def load(self, xclbin: Path) -> None:
        """Load other kernels."""
        _succeed(self._xrt.xrtDeviceLoadXclbinFile(self.handle, str(xclbin).encode()))
        _succeed(self._xrt.xrtDeviceGetXclbinUUID(self.handle, self._uuid))

    def allocate(self, size: int, flags: Flags = Flags.NORMAL, *, bank: int = 0) -> Buffer:
        return Buffer(size, _check(self._xrt.xrtBOAlloc(self.handle, size, flags, bank)))

    def close(self) -> None:
        for kernel in self._kernels.values():
            _succeed(self._xrt.xrtKernelClose(kernel))
        _succeed(self._xrt.xrtDeviceClose(self.handle))

    def kernel(self, name: str) -> int:
        if name not in self._kernels:
            self._kernels[name] = _check(self._xrt.xrtPLKernelOpen(self.handle, self._uuid, name.encode()))
        return self._kernels[name]


class Buffer:
    """A buffer object, or a part of one."""

    def __init__(self, size: int, handle: int) -> None:
        self._xrt = _library()
        self.size, self.handle = size, handle

    def part(self, size: int, offset: int) -> Buffer:
        """Return a buffer object on a part of this one."""
        return Buffer(size, _check(self._xrt.xrtBOSubAlloc(self.handle, size, offset)))

    def free(self) -> None:
        _succeed(self._xrt.xrtBOFree(self.handle))

    @property
    def address(self) -> int:
        return int(self._xrt.xrtBOAddress(self.handle))

    def map(self) -> NDArray[np.uint8]:
        """Return the host's memory of this buffer, which exists only as long as the buffer."""
        address = _check(self._xrt.xrtBOMap(self.handle))
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(address))

    def upload(self, size: int | None = None, offset: int = 0) -> None:
        _succeed(self._xrt.xrtBOSync(self.handle, 0, self.size if size is None else size, offset))

    def download(self, size: int | None = None, offset: int = 0) -> None:
        _succeed(self._xrt.xrtBOSync(self.handle, 1, self.size if size is None else size, offset))


class Run:
    """One run of a kernel; arguments are buffers and 32-bit words."""

    def __init__(self, device: Device, kernel: str, arguments: Sequence[Buffer | int]) -> None:
        self._xrt = _library()
        self.handle = _check(self._xrt.xrtRunOpen(device.kernel(kernel)))
        for index, argument in enumerate(arguments):
            self.set(index, argument)

    def set(self, index: int, argument: Buffer | int) -> None:
        value = ctypes.c_void_p(argument.handle) if isinstance(argument, Buffer) else ctypes.c_uint32(argument)
        _succeed(self._xrt.xrtRunSetArg(ctypes.c_void_p(self.handle), ctypes.c_int(index), value))

    def start(self) -> None:
        _succeed(self._xrt.xrtRunStart(self.handle))

    def wait(self, timeout_ms: int = round(1000 * LIMIT)) -> State:
        """Return the state at the run's end, or ``TIMEOUT``, after which this may be called again."""
        return State(self._xrt.xrtRunWaitFor(self.handle, timeout_ms))

    def state(self) -> State:
        return State(self._xrt.xrtRunState(self.handle))

    def close(self) -> None:
        _succeed(self._xrt.xrtRunClose(self.handle))


@contextmanager
def opened(index: int, xclbin: Path) -> Iterator[Device]:
    """Open a card, and close it after the block."""
    device = Device(index, xclbin)
    try:
        yield device
    finally:
        device.close()


def _check(handle: int | None) -> int:
    if not handle:
        code = ctypes.get_errno()
        raise XrtError(code, os.strerror(code))
    return handle


def _succeed(result: int) -> None:
    if result != 0:
        raise XrtError(abs(result), os.strerror(abs(result)))


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libxrt_coreutil.so.2", use_errno=True)
    pointer, size, unsigned = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    for name in ("xrtDeviceOpen", "xrtPLKernelOpen", "xrtBOAlloc", "xrtBOSubAlloc", "xrtBOMap", "xrtRunOpen"):
        getattr(library, name).restype = pointer
    library.xrtBOAddress.restype = ctypes.c_uint64
    signatures = {
        "xrtDeviceOpen": [unsigned],
        "xrtDeviceClose": [pointer],
        "xrtDeviceLoadXclbinFile": [pointer, ctypes.c_char_p],
        "xrtDeviceGetXclbinUUID": [pointer, pointer],
        "xrtPLKernelOpen": [pointer, pointer, ctypes.c_char_p],
        "xrtKernelClose": [pointer],
        "xrtBOAlloc": [pointer, size, ctypes.c_uint64, ctypes.c_uint32],
        "xrtBOSubAlloc": [pointer, size, size],
        "xrtBOFree": [pointer],
        "xrtBOAddress": [pointer],
        "xrtBOMap": [pointer],
        "xrtBOSync": [pointer, ctypes.c_int, size, size],
        "xrtRunOpen": [pointer],
        "xrtRunStart": [pointer],
        "xrtRunWaitFor": [pointer, unsigned],
        "xrtRunState": [pointer],
        "xrtRunClose": [pointer],
    }
    for name, arguments in signatures.items():
        getattr(library, name).argtypes = arguments
    return library
