"""Binds XRT's C API by Python callables, as the tests of the emulated card call it."""

from __future__ import annotations

import weakref
from pathlib import Path

from tests.xrt.api import Buffer, Device, Flags, Run

__all__ = ["ApiBinding"]


class _Kernel:
    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name


def _freed(buffer: Buffer) -> Buffer:
    weakref.finalize(buffer, buffer._xrt.xrtBOFree, buffer.handle)
    return buffer


class ApiBinding:
    """The binding that ``native.Card`` calls. Every object that it returns is closed when nobody holds it any more."""

    def __init__(self, index: int, xclbin: Path) -> None:
        self.device = Device(index, xclbin)
        weakref.finalize(self, self.device.close)

    def kernel(self, name: str) -> _Kernel:
        return _Kernel(self.device, name)

    def group(self, kernel: _Kernel, argument: int) -> int:
        return self.device.group(kernel.name, argument)

    def allocate(self, nbytes: int, p2p: bool, group: int) -> Buffer:
        return _freed(self.device.allocate(nbytes, Flags.P2P if p2p else Flags.NORMAL, bank=group))

    def part(self, buffer: Buffer, nbytes: int, offset: int) -> Buffer:
        return _freed(buffer.part(nbytes, offset))

    def address(self, buffer: Buffer) -> int:
        return buffer.map().ctypes.data

    def sync(self, buffer: Buffer, to_card: bool, nbytes: int, offset: int) -> None:
        (buffer.upload if to_card else buffer.download)(nbytes, offset)

    def run(self, kernel: _Kernel) -> Run:
        run = Run(self.device, kernel.name, [])
        weakref.finalize(run, run._xrt.xrtRunClose, run.handle)
        return run

    def set_scalar(self, run: Run, index: int, value: int) -> None:
        run.set(index, value)

    def set_buffer(self, run: Run, index: int, buffer: Buffer) -> None:
        run.set(index, buffer)

    def start(self, run: Run) -> None:
        run.start()

    def wait(self, run: Run, timeout_ms: int) -> int:
        return run.wait(timeout_ms)

    def state(self, run: Run) -> int:
        return run.state()
