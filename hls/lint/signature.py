"""Compares a kernel's top with the description of the kernels, and its AXI masters with the memory bank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clang.cindex import TypeKind

from hls.description import MAX_MASTERS, Argument, ArgumentKind, Kernel
from hls.lint.source import Cursor, Finding, Function, Source, parameters

__all__ = ["check_masters", "check_top", "masters"]

_BEAT_BYTES = 64
_WORDS = (TypeKind.UINT,)


def check_top(source: Source, kernel: Kernel) -> Iterator[Finding]:
    """Compare the source's top with the description: name, arguments in order, types, bundles."""
    for function in source.tops:
        if function.name != kernel.name:
            yield _finding(function, f"{function.name} can be seen from outside, but is not the kernel {kernel.name}")
    top = next((function for function in source.tops if function.name == kernel.name), None)
    if top is None:
        yield Finding(source.path, 1, f"there is no function {kernel.name}")
        return
    if not _has_c_linkage(top):
        yield _finding(top, f'{kernel.name} is not extern "C"')
    if top.cursor.result_type.kind != TypeKind.VOID:
        yield _finding(top, f"{kernel.name} returns something")
    yield from _check_names(top, kernel)
    described = {argument.name: argument for argument in kernel.arguments}
    for parameter in parameters(top.cursor):
        yield from _check_interface(top, parameter)
        if argument := described.get(parameter.spelling):
            yield from _check_argument(top, parameter, argument)


def masters(top: Function) -> list[str]:
    """Return the AXI masters of a kernel; ports without a bundle share the one named gmem."""
    ports = (pragma for pragma in top.named("INTERFACE") if pragma.mode == "m_axi")
    return list(dict.fromkeys(p.options.get("bundle", "gmem") for p in ports))


def check_masters(tops: Sequence[tuple[Function, int]], *, path: str) -> Iterator[Finding]:
    """Check the number of masters of all compute units.

    Args:
        tops: Kernels, each with its number of compute units.
        path: File to name if there are too many.
    """
    counts = {top.name: len(masters(top)) * num_units for top, num_units in tops}
    if sum(counts.values()) > MAX_MASTERS:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        total = sum(counts.values())
        yield Finding(path, 1, f"{total} AXI masters on one memory bank, which takes {MAX_MASTERS} ({listed})")


def _check_names(top: Function, kernel: Kernel) -> Iterator[Finding]:
    written = [str(parameter.spelling) for parameter in parameters(top.cursor)]
    described = [argument.name for argument in kernel.arguments]
    if written != described:
        yield _finding(top, f"arguments are {', '.join(written)}; described are {', '.join(described)}")


def _check_interface(top: Function, parameter: Cursor) -> Iterator[Finding]:
    """Check what every argument needs, whatever the description says about it."""
    kind = parameter.type.get_canonical().kind
    pragmas = [p for p in top.named("INTERFACE") if p.options.get("port") == parameter.spelling]
    if kind in (TypeKind.LVALUEREFERENCE, TypeKind.RVALUEREFERENCE):
        yield _finding(top, f"argument {parameter.spelling} is a reference")
    if kind == TypeKind.POINTER and not any(pragma.mode == "m_axi" for pragma in pragmas):
        yield _finding(top, f"pointer {parameter.spelling} has no m_axi INTERFACE")


def _check_argument(top: Function, parameter: Cursor, argument: Argument) -> Iterator[Finding]:
    kind = parameter.type.get_canonical()
    if argument.kind is ArgumentKind.SCALAR:
        if kind.kind not in _WORDS:
            yield _finding(top, f"argument {argument.name} is {kind.spelling}; described is a 32-bit word (uint32_t)")
        return
    if kind.kind != TypeKind.POINTER or kind.get_pointee().get_size() != _BEAT_BYTES:
        yield _finding(top, f"argument {argument.name} is {kind.spelling}; described is a pointer to 512-bit beats")
        return
    is_read = kind.get_pointee().is_const_qualified()
    if is_read != (argument.kind is ArgumentKind.READ):
        yield _finding(top, f"argument {argument.name} is {kind.spelling}; described is one to {argument.kind.value}")
    for pragma in top.named("INTERFACE"):
        if pragma.options.get("port") == argument.name and pragma.mode == "m_axi":
            bundle = pragma.options.get("bundle")
            if bundle != argument.bundle:
                yield pragma.finding(f"port {argument.name} is in bundle {bundle}; described is {argument.bundle}")
            if pragma.options.get("offset", "slave") != "slave":
                yield pragma.finding(f"port {argument.name} needs offset=slave: the host sets its address")


def _has_c_linkage(top: Function) -> bool:
    return bool(top.cursor.mangled_name == top.name)


def _finding(function: Function, message: str) -> Finding:
    return Finding(str(function.cursor.location.file), function.cursor.location.line, message)
