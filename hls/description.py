"""The one description of the kernels: their arguments in order, their ports, compute units and the card's memory.

The kernels follow from the rules in ``lightning_smartinfinity/common/update_rules.py``. Their C++ sources
(``hls/sources.py``), the xclbin for tests (``hls/xclbin.py``), ``smartssd.cfg`` and the lines for v++
(``hls/card_build.py``) are generated from them.

A kernel's arguments are, in this order::

    pointers:  gradient, <array>_in ..., <array>_out ..., parameter, status
    scalars:   numel, first, last, gradient_form, parameter_form, active, then the words of its rule

All scalars are 32-bit words; floats travel as their bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lightning_smartinfinity.common.update_rules import RULES

__all__ = [
    "BLOCK_SCALED_FORM",
    "DESIGNS",
    "EMULATED",
    "ERROR_BITS",
    "INTERFACE_VERSION",
    "KERNELS",
    "MAX_ARRAYS",
    "MAX_MASTERS",
    "SMARTSSD",
    "SPARSE_FORM",
    "STATUS_MAGIC",
    "STATUS_WORDS",
    "Argument",
    "ArgumentKind",
    "ComputeUnit",
    "Design",
    "Kernel",
    "MemoryBank",
    "Platform",
    "design_for",
]

# Version of the arguments, the status beat and the compressed payload; kernels write it into the status beat.
INTERFACE_VERSION = 2

# Forms of a compressed gradient. The first is combined with the dtype of the values; the second stands alone.
SPARSE_FORM = 0x100
BLOCK_SCALED_FORM = 0x200

# Words of the beat that every run ends with: its counts, its errors and checksums of the data that it moved. The
# version is the lower half of its word, the kernel's number the upper half.
STATUS_MAGIC = 0x5349534C
MAX_ARRAYS = 4  # of a kernel; as many fill the beat
STATUS_WORDS = (
    *("magic", "version_and_kernel", "count", "errors"),
    *("gradient_read", *(f"array{array}_read" for array in range(MAX_ARRAYS))),
    *("parameter_written", *(f"array{array}_written" for array in range(MAX_ARRAYS))),
    *("indices_read", "header_read"),
)
ERROR_BITS = {
    "bad_index": 1,
    "bad_header": 2,
    "bad_range": 4,
    "unknown_form": 8,
    "wrong_counts": 16,
    "bad_code": 32,
}

# Kernel interfaces that may share one memory bank (UG1393).
MAX_MASTERS = 15

_FIRST_ARGUMENT_OFFSET = 0x10
_RESERVED_BYTES = 4


class ArgumentKind(Enum):
    """How a kernel uses an argument."""

    READ = "read"
    """The kernel reads through the pointer."""
    WRITE = "write"
    """The kernel writes through the pointer."""
    SCALAR = "scalar"
    """The argument is a 32-bit word."""


@dataclass(frozen=True)
class Argument:
    """One argument of a kernel.

    Attributes:
        bundle: AXI master that a pointer's traffic goes through; empty for a scalar.
    """

    name: str
    kind: ArgumentKind
    bundle: str = ""

    @property
    def is_pointer(self) -> bool:
        return self.kind is not ArgumentKind.SCALAR

    @property
    def register_bytes(self) -> int:
        """Bytes of the argument in the kernel's register map."""
        return 8 if self.is_pointer else 4


@dataclass(frozen=True)
class Kernel:
    """A kernel as the host sees it.

    Attributes:
        number: Number that it writes into its status beat.
        arrays: Names of the arrays that it updates, in the order of a tasklet's extent.
        words: Names of the scalars that only this rule has.
    """

    name: str
    number: int
    arrays: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All arguments, in order."""
        read, write, scalar = ArgumentKind.READ, ArgumentKind.WRITE, ArgumentKind.SCALAR
        bundles = [f"gmem{index}" for index in range(len(self.arrays) + 2)]
        common = ("numel", "first", "last", "gradient_form", "parameter_form", "active")
        return (
            Argument("gradient", read, bundles[0]),
            *(Argument(f"{name}_in", read, bundle) for name, bundle in zip(self.arrays, bundles[1:], strict=False)),
            *(Argument(f"{name}_out", write, bundle) for name, bundle in zip(self.arrays, bundles[1:], strict=False)),
            Argument("parameter", write, bundles[-1]),
            Argument("status", write, bundles[0]),
            *(Argument(name, scalar) for name in (*common, *self.words)),
        )

    @property
    def bundles(self) -> tuple[str, ...]:
        """Names of the AXI masters."""
        return tuple(dict.fromkeys(argument.bundle for argument in self.arguments if argument.is_pointer))

    @property
    def register_offsets(self) -> tuple[int, ...]:
        """Offsets of the arguments in the register map (Vitis' layout of s_axilite for ap_ctrl_hs), in bytes."""
        offsets, offset = [], _FIRST_ARGUMENT_OFFSET
        for argument in self.arguments:
            offsets.append(offset)
            offset += argument.register_bytes + _RESERVED_BYTES
        return tuple(offsets)


@dataclass(frozen=True)
class ComputeUnit:
    """An instance of a kernel on the card."""

    kernel: Kernel
    name: str


@dataclass(frozen=True)
class MemoryBank:
    """The card's memory.

    Attributes:
        base: Its first address. In a real xclbin v++ chooses it; here it is any value except 0, so that an unset
            pointer is not a valid address.
        max_masters: AXI masters that may share it.
    """

    name: str
    base: int
    size_bytes: int
    max_masters: int = MAX_MASTERS


@dataclass(frozen=True)
class Platform:
    """The platform that v++ builds for.

    Attributes:
        shell: Name of the platform, for ``v++ --platform``.
        vbnv: Name of the shell that runs on the card, as XRT reports it.
        clock_mhz: Frequency that the kernels are planned for.
    """

    shell: str
    vbnv: str
    part: str
    clock_mhz: int
    bank: MemoryBank


@dataclass(frozen=True)
class Design:
    """Everything that goes onto a card.

    Raises:
        ValueError: If the compute units have more AXI masters than the memory bank takes, or share a name.
    """

    platform: Platform
    compute_units: tuple[ComputeUnit, ...]

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.compute_units]
        if len(set(names)) < len(names):
            raise ValueError(f"compute units share a name: {', '.join(names)}; give each its own")
        bank = self.platform.bank
        if self.num_masters > bank.max_masters:
            parts = ", ".join(f"{unit.name} {len(unit.kernel.bundles)}" for unit in self.compute_units)
            raise ValueError(
                f"{self.num_masters} AXI masters on {bank.name}, which takes {bank.max_masters} ({parts}); "
                "let ports share bundles, or leave compute units out"
            )

    @property
    def num_masters(self) -> int:
        """Number of AXI masters on the memory bank."""
        return sum(len(unit.kernel.bundles) for unit in self.compute_units)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that have compute units."""
        return tuple(dict.fromkeys(unit.kernel for unit in self.compute_units))


KERNELS = tuple(Kernel(rule.kernel, rule.number, rule.arrays, tuple(rule.scalars)) for rule in RULES)
"""The kernel of every update rule."""
assert all(len(kernel.arrays) <= MAX_ARRAYS and kernel.number < 1 << 16 for kernel in KERNELS)

_PLATFORM = Platform(
    shell="xilinx_u2_gen3x4_xdma_gc_2_202110_1",
    vbnv="xilinx_u2_gen3x4_xdma_gc_base_2",
    part="xcku15p-ffva1156-2LV-e",
    clock_mhz=200,
    bank=MemoryBank("bank0", base=0x40_0000_0000, size_bytes=4 << 30),
)


def _design(kernels: Sequence[Kernel], platform: Platform) -> Design:
    return Design(platform, tuple(ComputeUnit(kernel, f"{kernel.name}_1") for kernel in kernels))


def _designs() -> Iterator[Design]:
    """Combine kernels, in order, into designs with as many kernels as the memory bank has masters for."""
    kernels: list[Kernel] = []
    for kernel in KERNELS:
        if sum(len(each.bundles) for each in (*kernels, kernel)) > _PLATFORM.bank.max_masters:
            yield _design(kernels, _PLATFORM)
            kernels = []
        kernels.append(kernel)
    yield _design(kernels, _PLATFORM)


DESIGNS = tuple(_designs())
"""The designs that can be built for a card; every kernel is in one of them."""

SMARTSSD = DESIGNS[0]

EMULATED = _design(KERNELS, replace(_PLATFORM, bank=replace(_PLATFORM.bank, max_masters=sys.maxsize)))
"""All kernels at once, which only an emulated card has room for."""


def design_for(rule: str) -> Design:
    """Return the design that has the kernel of the update rule with this name."""
    return {kernel.name: design for design in DESIGNS for kernel in design.kernels}[f"{rule}_update"]
