"""Checks that a top and loops have the pragmas that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from clang.cindex import CursorKind, TypeKind

from hls.lint.source import LOOPS, Cursor, Finding, Function, Source, body_of, end_of, finding_at, parameters
from hls.lint.synthesis import reached
from hls.sources import COMPUTE_INTERVAL

__all__ = ["check_roles"]

_CONSTANT_HOUSES = frozenset({CursorKind.NAMESPACE, CursorKind.TRANSLATION_UNIT, CursorKind.ENUM_DECL})
_BEAT_BYTES = 64


def check_roles(source: Source, top: Function) -> Iterator[Finding]:
    """Find the pragmas that a top and loops lack."""
    yield from _check_top(top)
    for function in filter(None, map(source.written, reached(source, top.cursor))):
        for loop in function.inside(*LOOPS):
            yield from _check_loop(source, function, loop)


def _check_top(top: Function) -> Iterator[Finding]:
    """Check a kernel's interface: the registers, the protocol of the host, and a master for each pointer."""
    found = {(pragma.mode, pragma.options.get("port")) for pragma in top.named("INTERFACE")}
    pointers = [p for p in parameters(top.cursor) if p.type.get_canonical().kind == TypeKind.POINTER]
    needed = [("s_axilite", "return"), ("ap_ctrl_hs", "return"), *(("m_axi", str(p.spelling)) for p in pointers)]
    for mode, port in needed:
        if (mode, port) not in found:
            yield finding_at(top.cursor, f"{top.name} has no pragma INTERFACE {mode} port={port}")


def _check_loop(source: Source, function: Function, loop: Cursor) -> Iterator[Finding]:
    if loop.kind != CursorKind.FOR_STMT or len(list(loop.get_children())) != 4:
        yield finding_at(loop, f"{function.name}: a loop is no for (start; condition; step)")
        return
    body = body_of(loop)
    own = function.pragmas_of(body)
    names = {pragma.name for pragma in own}
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
    for pragma in (each for each in own if each.name == "PIPELINE"):
        interval = pragma.options.get("ii", "1")
        if not interval.isdigit() or int(interval) > most:
            yield pragma.finding(f"{function.name}: PIPELINE with II={interval}: the loop has to keep up with {most}")
    if not names & {"PIPELINE", "DATAFLOW"} and not has_inner_loop:
        yield finding_at(loop, f"{function.name}: an innermost loop has neither PIPELINE nor UNROLL")


def _has_inner_loop(source: Source, function: Function, body: Cursor) -> bool:
    """Return whether a loop stays a loop in the body, or in a function of the project that the body calls."""
    called = {each for _, called in source.calls(body) for each in reached(source, called)}
    # The body is searched as if it were a function of its own.
    places = [Function(body, function.pragmas), *filter(None, map(source.written, called))]
    loops = [(place, loop) for place in places for loop in place.inside(*LOOPS)]
    return any(all(p.name != "UNROLL" for p in place.pragmas_of(body_of(loop))) for place, loop in loops)


def _most_interval(body: Cursor) -> int:
    """Return the cycles that an iteration may take: those of the beats that it moves in any case, or else one."""
    moved: Counter[tuple[str, str]] = Counter()
    widths = {}
    for call in _in_any_case(body):
        if (stream := end_of(call)) is not None:
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


def _has_variable_bound(loop: Cursor) -> bool:
    """Return whether a loop's condition names anything but its own variable and constants outside of functions."""
    start, *rest = loop.get_children()
    own = {str(c.spelling) for c in start.walk_preorder() if c.kind == CursorKind.VAR_DECL}
    used = [c for c in rest[0].walk_preorder() if c.kind == CursorKind.DECL_REF_EXPR and c.spelling not in own]
    return any(c.referenced.semantic_parent.kind not in _CONSTANT_HOUSES for c in used)
