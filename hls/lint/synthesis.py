"""Finds constructs that cannot become hardware, in everything that a kernel's top reaches."""

from __future__ import annotations

from collections.abc import Iterator

from clang.cindex import CursorKind, StorageClass, TypeKind

from hls.lint.source import FUNCTIONS, Cursor, Finding, Function, Source, finding_at

__all__ = ["check_synthesis", "reached"]

_CONSTRUCTS = {
    CursorKind.CXX_NEW_EXPR: "new",
    CursorKind.CXX_DELETE_EXPR: "delete",
    CursorKind.CXX_THROW_EXPR: "throw",
    CursorKind.CXX_TRY_STMT: "try",
    CursorKind.GOTO_STMT: "goto",
    CursorKind.INDIRECT_GOTO_STMT: "goto",
    CursorKind.CXX_DYNAMIC_CAST_EXPR: "dynamic_cast",
    CursorKind.CXX_REINTERPRET_CAST_EXPR: "reinterpret_cast",
    CursorKind.CXX_TYPEID_EXPR: "typeid",
    CursorKind.ASM_STMT: "assembler",
}
_SELECTION = CursorKind.CONDITIONAL_OPERATOR
_GLOBAL = (CursorKind.NAMESPACE, CursorKind.TRANSLATION_UNIT)
_DOUBLES = (TypeKind.DOUBLE, TypeKind.LONGDOUBLE)


def check_synthesis(source: Source, top: Function) -> Iterator[Finding]:
    """Find heap, exceptions, goto, recursion, double precision, and calls of code of neither project nor toolchain."""
    for function in reached(source, top.cursor):
        if function.kind == CursorKind.CXX_METHOD and function.is_virtual_method():
            yield finding_at(function, f"{function.spelling} is virtual, which cannot be synthesised")
        for cursor in function.walk_preorder():
            yield from _check_construct(cursor)
            yield from _check_call(source, cursor)
        if any(function in reached(source, called) for _, called in source.calls(function)):
            yield finding_at(function, f"{function.spelling} calls itself, which cannot be synthesised")


def reached(source: Source, top: Cursor) -> set[Cursor]:
    """Return ``top`` and the project's functions that it calls, directly or not."""
    found: set[Cursor] = set()
    waiting = [top]
    while waiting:
        function = waiting.pop()
        if function not in found and source.owns(function):
            found.add(function)
            waiting.extend(called for _, called in source.calls(function))
    return found


def _check_construct(cursor: Cursor) -> Iterator[Finding]:
    if cursor.kind in _CONSTRUCTS:
        yield finding_at(cursor, f"{_CONSTRUCTS[cursor.kind]} cannot be synthesised")
    elif cursor.type.get_canonical().kind in _DOUBLES:
        yield finding_at(cursor, "double precision: write float, and 1.0f for 1.0")
    elif cursor.type.get_canonical().kind == TypeKind.VARIABLEARRAY:
        yield finding_at(cursor, f"the size of {cursor.spelling} is no constant")
    elif cursor.kind == CursorKind.VAR_DECL and cursor.storage_class == StorageClass.STATIC:
        yield finding_at(cursor, f"{cursor.spelling} is static: it would keep its value from one run to the next")
    elif cursor.type.kind == TypeKind.LVALUEREFERENCE and _SELECTION in {c.kind for c in cursor.get_children()}:
        yield finding_at(cursor, f"{cursor.spelling} refers to one of two variables: select the value")
    elif cursor.kind == CursorKind.DECL_REF_EXPR and _is_global_variable(cursor.referenced):
        yield finding_at(cursor, f"{cursor.spelling} belongs to no function: it would keep its value between runs")


def _is_global_variable(named: Cursor) -> bool:
    is_global = named.kind == CursorKind.VAR_DECL and named.semantic_parent.kind in _GLOBAL
    return is_global and not named.type.is_const_qualified()


def _check_call(source: Source, cursor: Cursor) -> Iterator[Finding]:
    if cursor.kind != CursorKind.CALL_EXPR:
        return
    called = cursor.referenced
    if called is None or called.kind not in FUNCTIONS:
        # Conversions and constructions without a function appear as calls of nothing.
        if called is not None and called.type.get_canonical().kind == TypeKind.POINTER:
            yield finding_at(cursor, f"a call through the pointer {called.spelling} cannot be synthesised")
    # A builtin of the compiler has the place of its call.
    elif called.spelling.startswith("__builtin_") or not (source.owns(called) or source.is_toolchain(called)):
        yield finding_at(cursor, f"call of {called.spelling}, which is neither the project's nor the toolchain's")
