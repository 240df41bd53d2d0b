"""Calls the kernels that hls/Makefile compiles for this machine."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hls.description import Kernel
from tests.helpers.waiting import BUILD_LIMIT, LIMIT
from tests.native.builds import locked

ROOT = Path(__file__).parents[2]

LIBRARIES = ("sequential", "threaded", "synthesised")
"""Builds that this process can load; hls/Makefile describes each."""
PROGRAMS = ("address", "thread")
"""Builds with a sanitizer, which only a process of their own can load."""

Buffer = npt.NDArray[np.uint8]
_MESSAGE_BYTES = 4096


class Simulation(Protocol):
    """A build of the kernels."""

    def run(self, kernel: Kernel, buffers: Sequence[Buffer], words: Sequence[int]) -> str:
        """Run a kernel once.

        Args:
            kernel: Which one.
            buffers: Gradient, the kernel's arrays, parameter and status, aligned to 64 bytes; changed in place.
            words: All of the kernel's scalars.

        Returns:
            The fault in the simulation: a deadlock, or a stream that was not read to its end. Empty if there is none.
        """


def aligned(num_bytes: int) -> Buffer:
    """Return memory that begins on a beat, filled with a pattern that is NaN in fp32 and so shows everywhere."""
    memory = np.full(num_bytes + 64, 0xFF, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + num_bytes]


def built(name: str) -> Path:
    """Bring a build up to date and return its file."""
    folder = ROOT / "build" / "csim"
    file = folder / (f"{name}.so" if name in LIBRARIES else name)
    with locked(folder / f"{name}.lock"):
        make = ["make", "-C", str(ROOT / "hls"), f"BUILD={folder}", str(file)]
        completed = subprocess.run(make, capture_output=True, text=True, timeout=BUILD_LIMIT)
    assert completed.returncode == 0, completed.stderr
    return file


class Library:
    """A build that is loaded into this process."""

    def __init__(self, file: Path) -> None:
        self._run = ctypes.CDLL(str(file)).csim_run
        self._run.argtypes = [ctypes.c_uint32, *[ctypes.c_void_p] * 3, ctypes.c_size_t]
        self._run.restype = None

    def run(self, kernel: Kernel, buffers: Sequence[Buffer], words: Sequence[int]) -> str:
        addresses = np.array([buffer.ctypes.data for buffer in buffers], np.uint64)
        scalars = np.array(words, np.uint32)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._run(kernel.number, addresses.ctypes.data, scalars.ctypes.data, message, _MESSAGE_BYTES)
        return message.value.decode()


class Program:
    """A build that runs in a process of its own each time, see hls/sim/server.cpp."""

    def __init__(self, file: Path) -> None:
        # Older thread sanitizers know fewer layouts of the address space than kernels choose from.
        self._command = ["setarch", "-R", str(file)] if shutil.which("setarch") else [str(file)]

    def run(self, kernel: Kernel, buffers: Sequence[Buffer], words: Sequence[int]) -> str:
        request = [struct.pack("=II", kernel.number, len(buffers))]
        for buffer in buffers:
            request += [struct.pack("=Q", buffer.nbytes), buffer.tobytes()]
        request += [struct.pack("=I", len(words)), np.array(words, np.uint32).tobytes()]
        done = subprocess.run(self._command, input=b"".join(request), capture_output=True, timeout=LIMIT)
        assert done.returncode == 0 and not done.stderr, done.stderr.decode()
        (size,) = struct.unpack_from("=Q", done.stdout)
        end = 8 + size
        message = done.stdout[8:end].decode()
        for buffer in buffers:
            buffer[:] = np.frombuffer(done.stdout, np.uint8, buffer.nbytes, end)
            end += buffer.nbytes
        return message
