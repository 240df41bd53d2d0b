"""Keeps a tasklet in a card's memory, and computes in numpy what a run of a kernel must make of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hls.description import (
    BLOCK_SCALED_FORM,
    INTERFACE_VERSION,
    KERNELS,
    MAX_ARRAYS,
    SPARSE_FORM,
    STATUS_MAGIC,
    STATUS_WORDS,
    Kernel,
)
from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES as DESCRIPTIONS
from lightning_smartinfinity.native import DType, crc32c
from tests.helpers.compressed import Codes, Payload, block_scaled_codes, compress, expand
from tests.helpers.golden import RULES, Bits, Floats, assert_same_bits, decode, encode, random_arrays
from tests.hls.simulation import Buffer, Simulation, aligned

KERNEL_OF: dict[type, Kernel] = {
    getattr(native, rule.step): kernel for kernel, rule in zip(KERNELS, DESCRIPTIONS, strict=True)
}
PADDING = 1024
GROUP = 32


@dataclass(frozen=True)
class Form:
    """The formats of gradients and parameters.

    Attributes:
        gradient: Dtype of the gradient's values.
        parameter: Dtype of the parameter.
        ratio: Share of the elements that a sparse gradient keeps; ``None`` for other gradients.
        block_scaled: Whether the gradient has 8 bits per element, made of fp32.
    """

    gradient: DType = DType.FLOAT32
    parameter: DType = DType.FLOAT32
    ratio: float | None = None
    block_scaled: bool = False

    @property
    def is_compressed(self) -> bool:
        return self.block_scaled or self.ratio is not None

    @property
    def gradient_word(self) -> int:
        if self.block_scaled:
            return BLOCK_SCALED_FORM
        return int(self.gradient.value) | (SPARSE_FORM if self.ratio is not None else 0)


FORMS = [
    *(Form(gradient, parameter, ratio) for gradient in DType for parameter in DType for ratio in (None, 0.1)),
    *(Form(DType.FLOAT32, parameter, block_scaled=True) for parameter in DType),
]
"""All forms that exist."""


@dataclass
class Tasklet:
    """Buffers as a card's memory holds them, poisoned where nothing was put.

    Attributes:
        step: The rule, and its scalars unless a run has others.
        dense: The gradient as the update must see it, fp32.
        gradient, arrays, parameter: The buffers that the kernel works on.
        payload: The parts of a compressed gradient.
    """

    step: Any
    numel: int
    form: Form
    dense: Floats
    gradient: Buffer
    arrays: list[Buffer]
    parameter: Buffer
    payload: Payload | None = None
    status: Buffer = field(default_factory=lambda: aligned(64))

    @property
    def kernel(self) -> Kernel:
        return KERNEL_OF[type(self.step)]

    def hold(self, payload: Payload, dense: Floats | None = None) -> Tasklet:
        """Take a compressed gradient, whose values are given unless it is a sparse one, and return this tasklet."""
        content = np.frombuffer(payload.tobytes(), np.uint8)
        self.payload, self.gradient = payload, stored_in(content, content.size)
        self.dense = expand(payload.tobytes()) if dense is None else dense
        return self

    def words(self, first: int, last: int, active: bool = True, step: Any = None) -> list[int]:
        """Return the kernel's scalars, floats as their bits."""
        rule = [getattr(step or self.step, name) for name in self.kernel.words]
        bits = [struct.unpack("<I", struct.pack("<f", value))[0] for value in rule]
        return [self.numel, first, last, self.form.gradient_word, int(self.form.parameter.value), int(active), *bits]

    def run_words(self, simulation: Simulation, words: list[int]) -> dict[str, int]:
        """Run the kernel with these scalars; assert that nothing goes wrong in the simulation. Return the status."""
        assert simulation.run(self.kernel, [self.gradient, *self.arrays, self.parameter, self.status], words) == ""
        return dict(zip(STATUS_WORDS, map(int, self.status.view(np.uint32)), strict=True))

    def run(
        self, simulation: Simulation, first: int = 0, last: int | None = None, *, active: bool = True, step: Any = None
    ) -> dict[str, int]:
        """Update the elements [first, last), and check every bit that the run wrote and that it wrote no other."""
        last = self.numel if last is None else last
        before = [memory.copy() for memory in (self.gradient, *self.arrays, self.parameter)]
        status = self.run_words(simulation, self.words(first, last, active, step))
        expected = self._expected(before[1:-1], first, last, active, step or self.step)
        for array, wanted in zip(self.arrays, expected, strict=True):
            same_numbers(array.view(np.float32), wanted)
        np.testing.assert_array_equal(self.gradient, before[0])
        self._check_parameter(before[-1], expected[0], first, last)
        assert status == {
            "magic": STATUS_MAGIC,
            "version_and_kernel": INTERFACE_VERSION | self.kernel.number << 16,
            "count": last - first,
            "errors": 0,
            **self._checksums(before, first, last, active),
        }
        return status

    def _expected(self, before: list[Buffer], first: int, last: int, active: bool, step: Any) -> list[Floats]:
        after = [array.view(np.float32).copy() for array in before]
        if active and first < last:
            part = slice(first, last)
            updated = RULES[type(step)](step, self.dense[part], tuple(array[part] for array in after))
            for array, values in zip(after, updated, strict=True):
                array[part] = values
        if first < last:
            stored_end = rounded_up(last, PADDING if last == self.numel else GROUP)
            for array in after:
                array[self.numel : stored_end] = 0
        return after

    def _check_parameter(self, before: Buffer, master: Floats, first: int, last: int) -> None:
        stored = np.float32 if self.form.parameter is DType.FLOAT32 else np.int16
        expected, found = before.view(stored).copy(), self.parameter.view(stored)
        if first < last:
            written = slice(first // GROUP * GROUP, rounded_up(last, GROUP))
            expected[written] = encode(master[written], self.form.parameter)
        same_numbers(decode(found, self.form.parameter), decode(expected, self.form.parameter))

    def _checksums(self, before: list[Buffer], first: int, last: int, active: bool) -> dict[str, int]:
        """Return the checksums of all that the run moved."""
        gradient, indices, header = 0, 0, 0
        if active and first < last and self.payload is not None:
            gradient, indices = checksum(self.payload.values), checksum(self.payload.indices)
            header = checksum(np.concatenate([self.payload.header, self.payload.counts]))
        elif active:
            gradient = checksum(part_of(before[0], first, last, self.form.gradient))
        sums = {"gradient_read": gradient, "indices_read": indices, "header_read": header}
        for number in range(MAX_ARRAYS):
            for name, arrays in (("read", before[1:-1]), ("written", self.arrays)):
                sums[f"array{number}_{name}"] = sum(
                    checksum(part_of(array, first, last, DType.FLOAT32)) for array in arrays[number : number + 1]
                )
        return {**sums, "parameter_written": checksum(part_of(self.parameter, first, last, self.form.parameter))}


def make_tasklet(step: Any, numel: int, form: Form, *, seed: int = 0, special: bool = False) -> Tasklet:
    """Return a tasklet of random values, see :func:`tests.helpers.golden.random_arrays`."""
    values, *state = random_arrays(step, numel, seed, special=special)
    arrays = [stored_in(array, rounded_up(numel, PADDING)) for array in state]
    parameter = aligned(rounded_up(numel, GROUP) * item_bytes(form.parameter))
    encoded = encode(values, form.gradient)
    gradient = stored_in(encoded, rounded_up(numel, GROUP))
    tasklet = Tasklet(step, numel, form, decode(encoded, form.gradient), gradient, arrays, parameter)
    if form.block_scaled:
        codes = _random_codes(numel, seed) if special else block_scaled_codes(values)
        return tasklet.hold(codes.payload(), codes.values)
    return tasklet if form.ratio is None else tasklet.hold(compress(values, form.ratio, form.gradient))


def _random_codes(numel: int, seed: int) -> Codes:
    """Return codes of every size but those whose products lie next to subnormals, which numpy may round otherwise."""
    random = np.random.default_rng(seed)
    exponents = random.choice([12, 100, 125, 130, 247, 248], -(-numel // 256)).astype(np.uint8)
    return Codes(exponents, random.integers(-127, 128, numel, np.int8))


def rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def item_bytes(dtype: DType) -> int:
    return 4 if dtype is DType.FLOAT32 else 2


def part_of(buffer: Buffer, first: int, last: int, dtype: DType) -> Buffer:
    """Return the bytes of the elements [first, last)."""
    return buffer[first * item_bytes(dtype) : last * item_bytes(dtype)]


def checksum(values: Buffer) -> int:
    return crc32c(values.ctypes.data, values.nbytes)


def same_numbers(found: Floats, expected: Floats) -> None:
    """Assert that two arrays are equal bit for bit; any NaN equals any other."""
    assert_same_bits(np.ascontiguousarray(found), expected)


def stored_in(values: Bits, capacity: int) -> Buffer:
    """Return memory that holds these values and is filled with poison after them."""
    memory = aligned(capacity * values.itemsize)
    memory[: values.nbytes] = values.view(np.uint8)
    return memory
