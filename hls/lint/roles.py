"""Checks that what a function, loop or variable is for comes with the pragmas that this takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import prod

from clang.cindex import CursorKind, TypeKind

from hls.lint.source import (
    LOOPS,
    Cursor,
    Finding,
    Function,
    Pragma,
    Source,
    finding_at,
    parameters,
    spans,
    variables_of,
)
from hls.lint.synthesis import reached
from hls.sources import COMPUTE_INTERVAL

__all__ = ["check_roles"]

_CONSTANT_HOUSES = frozenset({CursorKind.NAMESPACE, CursorKind.TRANSLATION_UNIT, CursorKind.ENUM_DECL})
_MOST_PARTS = 1024  # Vitis HLS partitions no array into more
_BEAT_BYTES = 64


def check_roles(source: Source, top: Function) -> Iterator[Finding]:
    """Find the pragmas that a top, a DATAFLOW region and its channels, and loops lack."""
    yield from _check_top(top)
    for function in filter(None, map(source.written, reached(source, top.cursor).values())):
        for block in (c for c in function.cursor.walk_preorder() if c.kind == CursorKind.COMPOUND_STMT):
            yield from _check_region(source, function, block)
        for loop in (c for c in function.cursor.walk_preorder() if c.kind in LOOPS):
            yield from _check_loop(source, function, loop)


def _check_top(top: Function) -> Iterator[Finding]:
    """Check a kernel's interface: the registers, the protocol of the host, and a master for each pointer."""
    found = {(pragma.mode, pragma.options.get("port")) for pragma in top.named("INTERFACE")}
    pointers = [p for p in parameters(top.cursor) if p.type.get_canonical().kind == TypeKind.POINTER]
    needed = [("s_axilite", "return"), ("ap_ctrl_hs", "return"), *(("m_axi", str(p.spelling)) for p in pointers)]
    for mode, port in needed:
        if (mode, port) not in found:
            yield finding_at(top.cursor, f"{top.name} has no pragma INTERFACE {mode} port={port}")


def _check_region(source: Source, function: Function, block: Cursor) -> Iterator[Finding]:
    """Check a block of which two statements or more call processes: functions that are kept apart."""
    names = _pragmas_of(function, block)
    calls = [c for s in block.get_children() for c in s.walk_preorder() if c.kind == CursorKind.CALL_EXPR]
    called = [written for c in calls if c.referenced and (written := source.written(_defined(c)))]
    processes = [each for each in called if _is_kept_apart(each)]
    if "DATAFLOW" not in names:
        # A block around a region has the region's calls in it, too.
        if len(processes) > 1 and not any(spans(block, p.line) for p in function.named("DATAFLOW")):
            yield finding_at(block, f"{function.name}: a block that calls {len(processes)} processes has no DATAFLOW")
        return
    for each in called:
        if not _is_kept_apart(each) and each.cursor.kind == CursorKind.FUNCTION_DECL:
            yield finding_at(each.cursor, f"the process {each.name} has no INLINE off")
    for variable in variables_of(block):
        yield from _check_channel(function, variable)


def _check_channel(function: Function, variable: Cursor) -> Iterator[Finding]:
    """Check a stream, whose depth stands in its type, too, or an array between two processes."""
    name, kind = str(variable.spelling), variable.type.get_canonical()
    is_array = kind.kind == TypeKind.CONSTANTARRAY and "hls::stream<" not in kind.spelling
    for needed in ("ARRAY_PARTITION" if is_array else "STREAM", "BIND_STORAGE"):
        if not _about(function, needed, name):
            yield finding_at(variable, f"{name} has no pragma {needed}")
    kind_of_storage = "ram_2p" if is_array else "fifo"
    for options in _about(function, "BIND_STORAGE", name):
        if options.get("type") != kind_of_storage:
            yield finding_at(variable, f"{name} is bound to type={options.get('type')}: it takes {kind_of_storage}")
    for options in _about(function, "ARRAY_PARTITION", name):
        if not 1 < (parts := _parts(kind, options.get("dim", "1"))) <= _MOST_PARTS:
            yield finding_at(variable, f"{name} is partitioned into {parts} parts: 2 to {_MOST_PARTS} may be")
    depth = re.search(r", (\d+)>$", kind.spelling)
    for options in _about(function, "STREAM", name):
        if depth and options.get("depth") != depth[1]:
            yield finding_at(
                variable, f"{name} has depth {depth[1]} in its type and {options.get('depth')} in its pragma"
            )


def _parts(array: Cursor, dimension: str) -> int:
    """Return into how many arrays a complete partition splits one; dimension 0 stands for all."""
    extents = []
    while array.kind == TypeKind.CONSTANTARRAY:
        extents.append(int(array.element_count))
        array = array.element_type
    return {"0": prod(extents), **{str(n): extent for n, extent in enumerate(extents, 1)}}.get(dimension, 1)


def _check_loop(source: Source, function: Function, loop: Cursor) -> Iterator[Finding]:
    if loop.kind != CursorKind.FOR_STMT or len(list(loop.get_children())) != 4:
        yield finding_at(loop, f"{function.name}: a loop is no for (start; condition; step)")
        return
    body = _body(loop)
    names = _pragmas_of(function, body)
    has_variable_bound = _has_variable_bound(loop)
    if "UNROLL" in names:
        if has_variable_bound:
            yield finding_at(loop, f"{function.name}: UNROLL of a loop whose bound is no constant")
        return
    if has_variable_bound and "LOOP_TRIPCOUNT" not in names:
        yield finding_at(loop, f"{function.name}: a loop whose bound is no constant has no LOOP_TRIPCOUNT")
    has_inner_loop = _has_inner_loop(source, function, body)
    if "PIPELINE" in names and has_inner_loop:
        yield finding_at(loop, f"{function.name}: PIPELINE of a loop in which another one is not unrolled")
    most = _most_interval(body)
    for pragma in (each for each in _own_pragmas(function, body) if each.name == "PIPELINE"):
        interval = pragma.options.get("ii", "1")
        if not interval.isdigit() or int(interval) > most:
            yield pragma.finding(f"{function.name}: PIPELINE with II={interval}: the loop has to keep up with {most}")
    if not names & {"PIPELINE", "DATAFLOW"} and not has_inner_loop:
        yield finding_at(loop, f"{function.name}: an innermost loop has neither PIPELINE nor UNROLL")


def _has_inner_loop(source: Source, function: Function, body: Cursor) -> bool:
    """Return whether a loop stays a loop in the body, or in a function of the project that the body calls."""
    calls = [_defined(c) for c in body.walk_preorder() if c.kind == CursorKind.CALL_EXPR and c.referenced]
    called = {name: cursor for call in calls for name, cursor in reached(source, call).items()}
    written = filter(None, map(source.written, called.values()))
    places = [(function, body), *((each, each.cursor) for each in written)]
    loops = [(each, c) for each, place in places for c in place.walk_preorder() if c.kind in LOOPS]
    return any("UNROLL" not in _pragmas_of(each, _body(loop)) for each, loop in loops)


def _most_interval(body: Cursor) -> int:
    """Return the cycles that an iteration may take: those of the beats that it moves in any case, or else one."""
    moved: Counter[tuple[str, str]] = Counter()
    widths = {}
    for call in _in_any_case(body):
        if call.kind == CursorKind.CALL_EXPR and call.spelling in ("read", "write"):
            stream = next(c for c in call.walk_preorder() if c.kind == CursorKind.DECL_REF_EXPR)
            moved[end := (stream.spelling, call.spelling)] += 1
            widths[end] = stream.type.get_canonical().get_template_argument_type(0).get_size()
    if not moved or min(widths.values()) < _BEAT_BYTES:
        return 1
    return COMPUTE_INTERVAL * max(moved.values())


def _in_any_case(statement: Cursor) -> Iterator[Cursor]:
    for child in statement.get_children():
        if child.kind != CursorKind.IF_STMT:
            yield child
            yield from _in_any_case(child)


def _body(loop: Cursor) -> Cursor:
    return list(loop.get_children())[-1]


def _has_variable_bound(loop: Cursor) -> bool:
    """Return whether a loop's condition names anything but its own variable and constants outside of functions."""
    start, *rest = loop.get_children()
    own = {str(c.spelling) for c in start.walk_preorder() if c.kind == CursorKind.VAR_DECL}
    used = [c for c in rest[0].walk_preorder() if c.kind == CursorKind.DECL_REF_EXPR and c.spelling not in own]
    return any(c.referenced.semantic_parent.kind not in _CONSTANT_HOUSES for c in used)


def _pragmas_of(function: Function, block: Cursor) -> set[str]:
    return {pragma.name for pragma in _own_pragmas(function, block)}


def _own_pragmas(function: Function, block: Cursor) -> list[Pragma]:
    """Return the pragmas in a block that are in no block inside of it."""
    inner = [c for c in block.walk_preorder() if c.kind == CursorKind.COMPOUND_STMT and c != block]
    return [p for p in function.pragmas if spans(block, p.line) and not any(spans(c, p.line) for c in inner)]


def _about(function: Function, name: str, variable: str) -> list[dict[str, str]]:
    return [p.options for p in function.named(name) if p.options.get("variable") == variable]


def _is_kept_apart(function: Function) -> bool:
    return any("off" in pragma.words for pragma in function.named("INLINE"))


def _defined(call: Cursor) -> Cursor:
    return call.referenced.get_definition() or call.referenced
