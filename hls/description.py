"""The one description of the kernels: their arguments in order, their ports, compute units and the card's memory.

The xclbin for tests (``hls/xclbin.py``), ``smartssd.cfg`` and the lines for v++ (``hls/card_build.py``) are generated
from it, and the C++ signatures are checked against it.

A kernel's arguments are, in this order::

    pointers:  gradient, <array>_in ..., <array>_out ..., parameter, status
    scalars:   numel, first, last, gradient_form, parameter_form, active, then the words of its rule

All scalars are 32-bit words; floats travel as their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "ADAGRAD",
    "ADAMW",
    "BLOCK_SCALED_FORM",
    "ERROR_BITS",
    "INTERFACE_VERSION",
    "KERNELS",
    "MAX_MASTERS",
    "SGD",
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
]

# Version of the arguments, the status beat and the compressed payload; kernels write it into the status beat.
INTERFACE_VERSION = 1

# Forms of a compressed gradient; the first is combined with the dtype of the values, the second stands alone.
SPARSE_FORM = 0x100
BLOCK_SCALED_FORM = 0x200

# Words of the beat that every run ends with: what it counted and found, and checksums of what it moved.
STATUS_MAGIC = 0x5349534C
STATUS_WORDS = (
    *("magic", "interface_version", "count", "errors"),
    *("gradient_read", "array0_read", "array1_read", "array2_read"),
    *("parameter_written", "array0_written", "array1_written", "array2_written"),
    *("indices_read", "header_read", "kernel", "zero"),
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
    def source(self) -> str:
        """Path of the source, from the root of the repository."""
        return f"hls/kernels/{self.name}.cpp"

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
        base: Its first address. In a real xclbin v++ chooses it; here it is any value but 0, so that a pointer that
            was not set is no address.
    """

    name: str
    base: int
    size_bytes: int


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
        if self.num_masters > MAX_MASTERS:
            parts = ", ".join(f"{unit.name} {len(unit.kernel.bundles)}" for unit in self.compute_units)
            raise ValueError(
                f"{self.num_masters} AXI masters on {self.platform.bank.name}, which takes {MAX_MASTERS} ({parts}); "
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


ADAMW = Kernel(
    "adamw_update",
    number=1,
    arrays=("master", "exp_avg", "exp_avg_sq"),
    words=(
        "gradient_scale",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "decay",
        "l2",
        "step_size",
        "inverse_sqrt_bias_correction2",
        "eps",
    ),
)
ADAGRAD = Kernel(
    "adagrad_update",
    number=2,
    arrays=("master", "sum"),
    words=("gradient_scale", "weight_decay", "step_size", "eps"),
)
SGD = Kernel(
    "sgd_update",
    number=3,
    arrays=("master", "momentum_buffer"),
    words=(
        "gradient_scale",
        "weight_decay",
        "buffer_coefficient",
        "gradient_coefficient",
        "nesterov_momentum",
        "lr",
    ),
)
KERNELS = (ADAMW, ADAGRAD, SGD)

SMARTSSD = Design(
    Platform(
        shell="xilinx_u2_gen3x4_xdma_gc_2_202110_1",
        vbnv="xilinx_u2_gen3x4_xdma_gc_base_2",
        part="xcku15p-ffva1156-2LV-e",
        clock_mhz=200,
        bank=MemoryBank("bank0", base=0x40_0000_0000, size_bytes=4 << 30),
    ),
    tuple(ComputeUnit(kernel, f"{kernel.name}_1") for kernel in KERNELS),
)
