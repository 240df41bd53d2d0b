"""A CUDA driver without a device, built from fake_cuda.cpp, which the core opens in tests instead of libcuda."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["SYNCHRONOUS", "FakeCuda"]

# Calls that make the host wait longer than necessary. The fake has only that of a stream.
SYNCHRONOUS = ("cuCtxSynchronize", "cuStreamSynchronize", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpy")


class FakeCuda:
    """The controls and observations of the fake driver.

    Streams are handles, like torch's ``cuda_stream``.

    Attributes:
        reset: Removes delays and failures and empties the log.
        delay: Delays copies by a random time, given a seed and the most microseconds.
        deinitialize: Removes the driver with all that it holds, as at the end of a process, until ``reset``.
        clear: Empties the log.
        wait: Waits until a stream has done all its work.
    """

    def __init__(self, library: Path) -> None:
        self.library = library
        self._gates: list[int] = []
        self._calls = calls = ctypes.CDLL(str(library))
        address, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        calls.fake_log.restype = ctypes.c_char_p
        calls.fake_stream.restype = calls.fake_gate.restype = address
        calls.fake_gate.argtypes = calls.fake_open.argtypes = calls.fake_wait.argtypes = [address]
        calls.fake_destroy.argtypes = [address]
        calls.fake_kernel.argtypes = [address, number, address, address, size]
        calls.fake_delay.argtypes = [ctypes.c_uint64, number]
        self.reset, self.clear, self.deinitialize = calls.fake_reset, calls.fake_clear, calls.fake_deinitialize
        self.delay, self.wait = calls.fake_delay, calls.fake_wait

    def fail(self, call: str, *, skipped: int = 0, result: int = 2) -> None:
        """Make a call fail after the given number of calls of the same name."""
        self._calls.fake_fail(call.encode(), skipped, result)

    def fail_copy(self, *, skipped: int = 0) -> None:
        """Make a copy fail on its stream after the given number of copies."""
        self._calls.fake_fail_copy(skipped)

    def log(self) -> list[str]:
        """Return the calls since ``clear``, for copies and registrations with host address and bytes."""
        return str(self._calls.fake_log().decode()).splitlines()

    def calls(self) -> list[str]:
        """Return the names of the calls in the log."""
        return [line.split()[0] for line in self.log()]

    def stream(self) -> int:
        """Return a stream of another user of the device, such as torch. It lives until :meth:`destroy`."""
        return int(self._calls.fake_stream())

    def destroy(self, stream: int) -> None:
        """Finish and destroy a stream. Gates that a failed test left closed are opened."""
        for gate in self._gates[:]:
            self.open(gate)
        assert self._calls.fake_destroy(stream) == 0

    def kernel(self, stream: int, to: NDArray[np.float32], values: NDArray[np.float32], *, us: int = 0) -> None:
        """Start ``to = values`` on a stream after a delay. The caller keeps both arrays alive."""
        assert to.dtype == values.dtype == np.float32 and to.size == values.size
        self._calls.fake_kernel(stream, us, to.ctypes.data, values.ctypes.data, to.size)

    def gate(self, stream: int) -> int:
        """Stop a stream at this point until :meth:`open`."""
        self._gates.append(int(self._calls.fake_gate(stream)))
        return self._gates[-1]

    def open(self, gate: int) -> None:
        """Open a gate, so that its stream continues."""
        self._gates.remove(gate)
        self._calls.fake_open(gate)

    def held(self) -> dict[str, int]:
        """Return the number of driver objects that the package and the tests hold."""
        names = ("events", "streams", "registered", "contexts")
        return {name: int(getattr(self._calls, f"fake_num_{name}")()) for name in names}

    @property
    def unmapped(self) -> bool:
        """Return whether memory was ever unmapped while it was registered."""
        return bool(self._calls.fake_unmapped())
