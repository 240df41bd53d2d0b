"""Generates the C++ header ``card_kernels.hpp``: every kernel's signature and number, and a list of all of them."""

from __future__ import annotations

from hls.description import KERNELS, Argument, ArgumentKind, Kernel

__all__ = ["header"]

_HEADER = """\
// Generated from hls/description.py by `python -m hls.generate signatures`.
//
// The kernels' signatures: pointers to card memory, then 32-bit words. docs/smartssd_kernels.md explains each argument.
#pragma once

#include "beats.hpp"

// Lists every kernel: its function, its number and how many arrays it has.
#define CARD_KERNELS(X) {listed}

namespace card {{

// The number that a kernel writes into its status.
enum KernelNumber : std::uint32_t {{ {numbers} }};

}}  // namespace card

extern "C" {{
{signatures}
}}
"""


def header() -> str:
    """Return the header's text."""
    return _HEADER.format(
        listed=" ".join(f"X({kernel.name}, {kernel.number}, {len(kernel.arrays)})" for kernel in KERNELS),
        numbers=", ".join(f"k_{kernel.name} = {kernel.number}" for kernel in KERNELS),
        signatures="\n".join(map(_signature, KERNELS)),
    )


def _signature(kernel: Kernel) -> str:
    parameters = ",\n    ".join(f"{_type(argument)} {argument.name}" for argument in kernel.arguments)
    return f"void {kernel.name}(\n    {parameters});"


def _type(argument: Argument) -> str:
    if not argument.is_pointer:
        return "std::uint32_t"
    beat = "Words" if argument.name in ("gradient", "parameter", "status") else "Floats"
    return f"{'const ' if argument.kind is ArgumentKind.READ else ''}card::{beat}*"
