"""Checks that pragmas are known, stand in the right place and refer to things that exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from clang.cindex import CursorKind, TypeKind

from hls.lint.source import LOOPS, Cursor, Finding, Function, Pragma, Source, body_of, parameters

__all__ = ["check_pragmas"]


class _Kind(NamedTuple):
    """The options and words that a pragma may have, apart by blanks.

    Attributes:
        needs_loop: Whether it describes a loop and so must stand in the loop's body.
    """

    options: str = ""
    words: str = ""
    needs_loop: bool = False


# The pragmas that the kernels use; another one is added here with the words and options that v++ knows for it.
_KNOWN = {
    "ARRAY_PARTITION": _Kind("variable dim", "complete"),
    "BIND_STORAGE": _Kind("variable type impl"),
    "DATAFLOW": _Kind(),
    "INLINE": _Kind(words="off"),
    "INTERFACE": _Kind(
        "port bundle offset max_read_burst_length max_write_burst_length num_read_outstanding num_write_outstanding",
        "m_axi s_axilite ap_ctrl_hs",
    ),
    "LOOP_TRIPCOUNT": _Kind("min max", needs_loop=True),
    "PIPELINE": _Kind("ii", needs_loop=True),
    "STREAM": _Kind("variable depth"),
    "UNROLL": _Kind("factor", needs_loop=True),
}
_STORAGE = ("bram", "srl", "uram")
_NUMBERS = frozenset(["ii", "factor", "dim", "depth", "min", "max", "num_read_outstanding", "num_write_outstanding"])
_MAX_WIDTH_BITS = 1024
_AXI_BOUNDARY_BYTES = 4096


def check_pragmas(source: Source) -> Iterator[Finding]:
    """Find unknown pragmas and options, misplaced pragmas, and ports, variables and constants that do not exist."""
    for pragma in source.homeless:
        yield pragma.finding(f"pragma {pragma.name} stands outside of every function")
    constants = source.constants()
    for function in source.functions:
        in_loops = [pragma for loop in function.inside(*LOOPS) for pragma in function.pragmas_of(body_of(loop))]
        for pragma in function.pragmas:
            if pragma.name not in _KNOWN:
                yield pragma.finding(f"unknown pragma {pragma.name}")
                continue
            yield from _check_form(pragma, _KNOWN[pragma.name], constants)
            if _KNOWN[pragma.name].needs_loop and pragma not in in_loops:
                yield pragma.finding(f"pragma {pragma.name} does not stand in a loop's body")
            yield from _check_variable(function, pragma)
            if pragma.name == "INTERFACE":
                yield from _check_port(function, pragma)


def _check_form(pragma: Pragma, kind: _Kind, constants: set[str]) -> Iterator[Finding]:
    unknown = [f"{name}=" for name in pragma.options if name not in kind.options.split()]
    unknown += [word for word in pragma.words if word.lower() not in kind.words.split()]
    if unknown:
        yield pragma.finding(f"pragma {pragma.name} has no {', '.join(unknown)}")
    for name, value in pragma.options.items():
        if name in _NUMBERS and not value.isdigit() and value not in constants:
            yield pragma.finding(f"pragma {pragma.name}: {name}={value} is neither a number nor a constant")
        if name in _NUMBERS - {"min", "dim"} and value == "0":
            yield pragma.finding(f"pragma {pragma.name}: {name}=0 is less than 1")
        if name == "impl" and value not in _STORAGE:
            yield pragma.finding(f"pragma {pragma.name}: impl={value} is none of {', '.join(_STORAGE)}")
    least, most = (pragma.options.get(name, "") for name in ("min", "max"))
    if least.isdigit() and most.isdigit() and int(least) > int(most):
        yield pragma.finding(f"pragma {pragma.name}: min={least} is more than max={most}")


def _check_variable(function: Function, pragma: Pragma) -> Iterator[Finding]:
    if "variable" not in _KNOWN[pragma.name].options.split():
        return
    name = pragma.options.get("variable")
    if name is None:
        yield pragma.finding(f"pragma {pragma.name} names no variable")
        return
    if name not in {c.spelling for c in function.inside(CursorKind.PARM_DECL, CursorKind.VAR_DECL)}:
        yield pragma.finding(f"pragma {pragma.name}: there is no variable {name} in {function.name}")


def _check_port(function: Function, pragma: Pragma) -> Iterator[Finding]:
    ports = {str(c.spelling): c.type.get_canonical() for c in parameters(function.cursor)}
    port = pragma.options.get("port")
    if not pragma.mode:
        yield pragma.finding("pragma INTERFACE names no mode")
    elif port == "return":
        if pragma.mode == "m_axi":
            yield pragma.finding("pragma INTERFACE: return cannot be m_axi")
    elif port not in ports:
        yield pragma.finding(f"pragma INTERFACE: {function.name} has no port {port}")
    elif pragma.mode == "m_axi":
        yield from _check_master(pragma, port, ports[port])


def _check_master(pragma: Pragma, port: str, kind: Cursor) -> Iterator[Finding]:
    if kind.kind != TypeKind.POINTER:
        yield pragma.finding(f"m_axi port {port} is no pointer")
        return
    beat_bytes = kind.get_pointee().get_size()
    width = beat_bytes * 8
    if width > _MAX_WIDTH_BITS or width & (width - 1):
        yield pragma.finding(f"m_axi port {port} is {width} bits wide: not a power of two of at most {_MAX_WIDTH_BITS}")
    for name in ("max_read_burst_length", "max_write_burst_length"):
        beats = pragma.options.get(name, "0")
        if not beats.isdigit():
            yield pragma.finding(f"m_axi port {port}: {name}={beats} has to be a number")
        elif int(beats) * beat_bytes > _AXI_BOUNDARY_BYTES:
            yield pragma.finding(
                f"m_axi port {port}: {name}={beats} beats of {beat_bytes} bytes are more than the "
                f"{_AXI_BOUNDARY_BYTES} that an AXI burst may span"
            )
    if kind.get_pointee().is_const_qualified() and "max_write_burst_length" in pragma.options:
        yield pragma.finding(f"m_axi port {port} is read only, but has max_write_burst_length")
