"""Estimates how much of the FPGA the kernels take; nothing is measured: ``python -m hls.resources``.

It prints the tables of docs/smartssd_kernels.md. Counts come from the sources named next to them; the cost of
each unit is an estimate unless it follows from the FPGA's cells (AMD UG574, UG573).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hls.description import DESIGNS, KERNELS, Design, Kernel
from lightning_smartinfinity.common.update_rules import RULES

__all__ = ["beat_columns", "expected", "network_luts", "report"]

# Figures of a beat (beats.hpp) and of a port's bursts (the kernels' INTERFACE pragmas).
_LANES, _BEAT_BITS, _BURST_BEATS, _BURSTS = 16, 512, 64, 4
_POLYNOMIAL = 0x82F63B78
# Resources of the KU15P (AMD DS890).
_KU15P = {"LUT": 522_720, "FF": 1_045_440, "BRAM36": 984, "URAM": 128, "DSP": 1_968}
# With PIPELINE II = 8 two copies of each operator work on the sixteen lanes, eight lanes each.
_COPIES = 2


_OPERATORS = {kernel: rule.operators for kernel, rule in zip(KERNELS, RULES, strict=True)}

# Estimates for single precision, with the DSPs that Vitis HLS uses by default (three for fmul, two for fadd).
_OPERATOR_LUTS, _OPERATOR_DSPS = (80, 210, 780, 460), (3, 2, 0, 0)
# Both inputs of an operator choose among eight lanes: two 6-input LUTs for each of 32 bits.
_MULTIPLEXER_LUTS = 2 * 32 * 2
# Estimates for integer logic: for each of 32 halves two comparisons of 6 LUTs, and two ANDs per LUT; choosing a lane's
# stored value; widening and narrowing a half; a 512-bit adapter; the control of the tile and the processes.
_MASK_LUTS, _STORED_LUTS, _WIDENED_LUTS, _NARROWED_LUTS = 32 * 2 * 6 + _BEAT_BITS // 2, 80, 70, 110
_MASTER_LUTS, _CONTROL_LUTS = 2_400, 5_000
# A lane's code: select one of four bytes, convert it to fp32, and mask it as above; then select the block's exponent
# from the 64 exponents of a beat, sixteen LUTs for each of eight bits.
_SCALED_LUTS, _EXPONENT_LUTS = 8 + 35 + 2 * 6, 8 * 16
# `Run` (run.hpp) holds ten words, three flags and the status.
_RUN_BITS = 10 * 32 + 3 + _BEAT_BITS
# The streams of entries (48 bits x 64, two shift registers of 32 to a bit) and of findings (32 bits x 16).
_SMALL_STREAM_LUTS, _SMALL_STREAM_FFS = 48 * 2 + 32, 48 + 32

# Flip-flops, all estimates: the pipeline of each operator; a register after every second LUT of a checksum's network,
# which is two levels; what a process keeps of its run and of the beat that it reads and the one that it writes; a
# stream's output; an adapter's two channels; a register for each converted number.
_OPERATOR_FFS = (143, 205, 761, 405)
_PROCESS_FFS, _MASTER_FFS, _CONTROL_FFS = _RUN_BITS + 2 * _BEAT_BITS, 3_000, 5_000
_CONVERTED_FFS = (33 + 32 + _LANES) * 32


def beat_columns() -> list[list[int]]:
    """Return how each bit of each word of a beat changes the register by the end of the beat, as in crc32c.hpp."""
    columns = [[0] * 32 for _ in range(_LANES)]
    for bit in range(32):
        crc = 1 << bit
        for word in reversed(range(_LANES)):
            for _ in range(32):
                crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
            columns[word][bit] = crc
    return columns


def network_luts() -> int:
    """Return the 6-input LUTs of a checksum's network: a separate tree of XORs for each bit of the register."""
    columns = beat_columns()
    inputs = [column for word in (columns[0], *columns) for column in word]  # the register adds to the first word
    terms = [sum(column >> bit & 1 for column in inputs) for bit in range(32)]
    return sum(-(-(count - 1) // 5) for count in terms)


def _networks(kernel: Kernel) -> int:
    """Count the checksums: dense gradient, header, counts, indices, values; two per array; two loops of the parameter.

    The beats of a block-scaled gradient use the networks of a sparse one.
    """
    return 5 + 2 * len(kernel.arrays) + 2


def _masks(kernel: Kernel) -> int:
    """Count the checksums of a range: dense gradient, two per array, two loops of the parameter."""
    return 1 + 2 * len(kernel.arrays) + 2


def _streams(kernel: Kernel) -> int:
    """Count the streams of beats: values, indices, dense, gradients, parameters, two per array; a run has as many."""
    return 5 + 2 * len(kernel.arrays)


def _processes(kernel: Kernel) -> int:
    """Count the processes, which the links of the run's chain join."""
    return _streams(kernel) + 1


def _operator_cost(kernel: Kernel, multiply: int, add: int, divide: int, root: int) -> int:
    """Return the cost of all copies of a kernel's operators, from the cost of each operator."""
    each = _OPERATORS[kernel]
    return _COPIES * (each.multiply * multiply + each.add * add + each.divide * divide + each.root * root)


def _luts(kernel: Kernel) -> dict[str, int]:
    return {
        "operators (multiplier 80 LUT, adder 210, divider 780, root 460), their inputs' multiplexers (128)": (
            _operator_cost(kernel, *_OPERATOR_LUTS) + _operator_cost(kernel, 1, 1, 1, 1) * _MULTIPLEXER_LUTS
        ),
        f"checksums: {network_luts():,} per network, {_either(_networks)} of them": _networks(kernel) * network_luts(),
        f"masks of ranges ({_MASK_LUTS} each, {_either(_masks)} of them) and padding": (
            _masks(kernel) * _MASK_LUTS + len(kernel.arrays) * _COPIES * _STORED_LUTS
        ),
        f"fp16, bf16: 33 halves widened ({_WIDENED_LUTS} each), 32 narrowed ({_NARROWED_LUTS})": (
            33 * _WIDENED_LUTS + 32 * _NARROWED_LUTS
        ),
        f"8-bit codes: {_LANES} scaled ({_SCALED_LUTS} each), their exponent ({_EXPONENT_LUTS})": (
            _LANES * _SCALED_LUTS + _EXPONENT_LUTS
        ),
        f"streams: 512 bits x 32 in shift registers, {_either(_streams)} of them; as many links of the run's chain,"
        f" {_RUN_BITS} bits each; entries, findings": _streams(kernel) * (_BEAT_BITS + _RUN_BITS) + _SMALL_STREAM_LUTS,
        f"AXI masters ({_MASTER_LUTS:,} each), {_either(_masters)} at 512 bits": _masters(kernel) * _MASTER_LUTS,
        "tile, control": _CONTROL_LUTS,
    }


def _ffs(kernel: Kernel) -> dict[str, int]:
    return {
        "operators (multiplier 143, adder 205, divider 761, root 405)": _operator_cost(kernel, *_OPERATOR_FFS),
        f"checksums: {network_luts() // 2:,} per network and its register of 32": (
            _networks(kernel) * (network_luts() // 2 + 32)
        ),
        f"processes: a run and two beats ({_PROCESS_FFS:,} each), {_either(_processes)} of them": (
            _processes(kernel) * _PROCESS_FFS
        ),
        "streams: the output of each": _streams(kernel) * (_BEAT_BITS + _RUN_BITS) + _SMALL_STREAM_FFS,
        f"AXI masters ({_MASTER_FFS:,} each)": _masters(kernel) * _MASTER_FFS,
        "fp16, bf16, 8-bit codes: 32 for each number": _CONVERTED_FFS,
        "tile, control": _CONTROL_FFS,
    }


def _masters(kernel: Kernel) -> int:
    return len(kernel.bundles)


def _either(count: Callable[[Kernel], int]) -> str:
    """List the counts of all kernels, each once."""
    return " or ".join(map(str, dict.fromkeys(map(count, KERNELS))))


def _bram36(kernel: Kernel) -> int:
    """Count blocks: each pointer's bursts take 72 bits in a block of 512; the counts, 4 bits in a block of 8,192."""
    assert _BURSTS * _BURST_BEATS <= 512
    pointers = sum(argument.is_pointer for argument in kernel.arguments)
    return pointers * -(-_BEAT_BITS // 72) + 32 // 4


def _totals(kernel: Kernel) -> dict[str, int]:
    return {
        "LUT": round(sum(_luts(kernel).values()), -3),
        "FF": round(sum(_ffs(kernel).values()), -3),
        "BRAM36": _bram36(kernel),
        "URAM": 2 * _LANES,
        "DSP": _operator_cost(kernel, *_OPERATOR_DSPS),
    }


def expected(kernel: Kernel) -> dict[str, int]:
    """Return what a kernel should take, by the names of ``CsynthReport``."""
    return {name.lower().removesuffix("36"): count for name, count in _totals(kernel).items()}


_TOTAL_NAMES = {
    "FF": "flip-flops",
    "BRAM36": "BRAM36: 8 per port and direction (4 bursts of 64 beats), 8 for counts",
    "URAM": "URAM: 16 banks of 4,096 fp32, twice",
}


def report() -> str:
    """Return the tables in Markdown."""
    parts = [_operations(), _thousands("LUT", _luts), _thousands("flip-flops", _ffs), *map(_shares, DESIGNS)]
    return "\n".join("\n".join(f"| {' | '.join(row)} |" for row in part) + "\n" for part in parts)


def _head(*cells: str) -> list[Sequence[str]]:
    return [cells, ["---"] * len(cells)]


def _operations() -> list[Sequence[str]]:
    title = "DSP of two of each (3 per multiplier, 2 per adder)"
    rows = _head("operations per element", "multiply", "add", "divide", "root", title)
    for kernel in KERNELS:
        each = _OPERATORS[kernel]
        counts = (each.multiply, each.add, each.divide, each.root)
        rows.append([f"`{kernel.name}`", *(str(count or "-") for count in counts), str(_totals(kernel)["DSP"])])
    return rows


def _thousands(what: str, count: Callable[[Kernel], dict[str, int]]) -> list[Sequence[str]]:
    rows = _head(
        f"thousands of {what} (what one of each takes is an estimate)", *(f"`{kernel.name}`" for kernel in KERNELS)
    )
    columns = [count(kernel) for kernel in KERNELS]
    rows += [[name, *(f"{column[name] / 1000:.1f}" for column in columns)] for name in columns[0]]
    return [*rows, ["together", *(f"{sum(column.values()) / 1000:.1f}" for column in columns)]]


def _shares(design: Design) -> list[Sequence[str]]:
    rows = _head("", *(f"`{kernel.name}`" for kernel in design.kernels), "together", "of the KU15P")
    for name, available in _KU15P.items():
        counts = [_totals(kernel)[name] for kernel in design.kernels]
        cells = [f"{count:,}" for count in (*counts, sum(counts))]
        rows.append([_TOTAL_NAMES.get(name, name), *cells, f"{sum(counts) / available:.0%}"])
    masters = [_masters(kernel) for kernel in design.kernels]
    return [*rows, ["AXI masters on the one bank, of at most 15", *map(str, (*masters, sum(masters))), ""]]


if __name__ == "__main__":
    sys.stdout.write(report())
