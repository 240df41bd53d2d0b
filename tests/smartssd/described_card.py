"""A binding to a card that knows only ``hls/description.py``, to check the calls of the native core."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hls.description import (
    BLOCK_SCALED_FORM,
    INTERFACE_VERSION,
    KERNELS,
    SPARSE_FORM,
    STATUS_MAGIC,
    STATUS_WORDS,
    Kernel,
)
from lightning_smartinfinity.native import DType, crc32c
from tests.helpers.compressed import BLOCK_SCALED_MAGIC
from tests.helpers.golden import Bits, encode
from tests.helpers.payload import Payload

__all__ = ["Call", "DescribedCard"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_COMPLETED = 4


@dataclass
class Call:
    """A run of a kernel, with the arguments that it was given, by name.

    Attributes:
        words: Scalars, as their bits.
        memory: Memory of the pointers.
        arrays: Contents of the arrays at the start.
    """

    kernel: Kernel
    words: dict[str, int] = field(default_factory=dict)
    memory: dict[str, Bytes] = field(default_factory=dict)
    arrays: dict[str, Floats] = field(default_factory=dict)

    @property
    def elements(self) -> slice:
        return slice(self.words["first"], self.words["last"])


class DescribedCard:
    """A stand-in for a card behind ``native.Card``.

    Its kernels leave the state unchanged: they copy the narrowed master to the parameters and report a status.

    Args:
        payload: The compressed gradient that the card will be sent, if any.
    """

    def __init__(self, payload: Payload | None = None) -> None:
        self.calls: list[Call] = []
        self.tamper: Callable[[dict[str, int]], None] = lambda status: None
        self._payload = payload

    def kernel(self, name: str) -> Kernel:
        return next(kernel for kernel in KERNELS if kernel.name == name)

    def group(self, kernel: Kernel, argument: int) -> int:
        assert kernel.arguments[argument].is_pointer
        return 0

    def allocate(self, nbytes: int, p2p: bool, group: int) -> Bytes:
        return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)

    def part(self, buffer: Bytes, nbytes: int, offset: int) -> Bytes:
        return buffer[offset : offset + nbytes]

    def address(self, buffer: Bytes) -> int:
        return buffer.ctypes.data

    def sync(self, buffer: Bytes, to_card: bool, nbytes: int, offset: int) -> None:
        """Do nothing, because host and card share memory."""

    def run(self, kernel: Kernel) -> Call:
        return Call(kernel)

    def set_scalar(self, call: Call, index: int, value: int) -> None:
        argument = call.kernel.arguments[index]
        assert not argument.is_pointer
        call.words[argument.name] = value & 0xFFFFFFFF

    def set_buffer(self, call: Call, index: int, buffer: Bytes) -> None:
        argument = call.kernel.arguments[index]
        assert argument.is_pointer
        call.memory[argument.name] = buffer

    def start(self, call: Call) -> None:
        names = {argument.name for argument in call.kernel.arguments}
        assert call.words.keys() | call.memory.keys() == names
        numel = call.words["numel"]
        arrays = {name: call.memory[f"{name}_in"].view(np.float32)[:numel].copy() for name in call.kernel.arrays}
        self.calls.append(Call(call.kernel, dict(call.words), dict(call.memory), arrays))
        status = self._status(call, self._parameters(call))
        if call.words["active"]:
            self.tamper(status)
        call.memory["status"][:64] = np.array([status[name] for name in STATUS_WORDS], np.uint32).view(np.uint8)

    def wait(self, call: Call, timeout_ms: int) -> int:
        return _COMPLETED

    def state(self, call: Call) -> int:
        return _COMPLETED

    def _parameters(self, call: Call) -> Bits:
        values = encode(call.memory["master_in"].view(np.float32)[call.elements], DType(call.words["parameter_form"]))
        found = call.memory["parameter"].view(values.dtype)
        found[call.elements] = values
        return values

    def _status(self, call: Call, parameters: Bits) -> dict[str, int]:
        status = dict.fromkeys(STATUS_WORDS, 0) | {
            "magic": STATUS_MAGIC,
            "version_and_kernel": INTERFACE_VERSION | call.kernel.number << 16,
            "count": call.words["last"] - call.words["first"],
            "parameter_written": _checksum(parameters),
        }
        for number, name in enumerate(call.kernel.arrays):
            values = call.memory[f"{name}_in"].view(np.float32)[call.elements]
            status[f"array{number}_read"] = status[f"array{number}_written"] = _checksum(values)
        return status | (self._gradient(call) if call.words["active"] else {})

    def _gradient(self, call: Call) -> dict[str, int]:
        form = call.words["gradient_form"]
        if self._payload is None:
            stored = call.memory["gradient"].view(encode(np.zeros(1, np.float32), DType(form)).dtype)
            return {"gradient_read": _checksum(stored[call.elements])}
        sent = self._payload
        header = sent.header.view(np.uint32)
        assert form == (BLOCK_SCALED_FORM if header[0] == BLOCK_SCALED_MAGIC else SPARSE_FORM | int(header[5]))
        return {
            "gradient_read": _checksum(sent.values),
            "indices_read": _checksum(sent.indices),
            "header_read": _checksum(np.concatenate([sent.header, sent.counts])),
        }


def _checksum(values: Bits) -> int:
    values = np.ascontiguousarray(values)
    return crc32c(values.ctypes.data, values.nbytes)
