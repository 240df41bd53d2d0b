"""Checks DATAFLOW: where it has to be, the pragmas of its processes and channels, and who uses what.

A stream has one producer and one consumer, a pointer one process, a master one reader and one writer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from clang.cindex import CursorKind, TypeKind

from hls.lint.source import (
    FUNCTIONS,
    Cursor,
    Finding,
    Function,
    Source,
    definition_of,
    end_of,
    finding_at,
    parameters,
    spans,
    variables_of,
)

__all__ = ["check_dataflow"]


_MOST_PARTS = 1024  # Vitis HLS partitions no array into more


class _Process(NamedTuple):
    """A call in a DATAFLOW region."""

    name: str
    function: Cursor
    arguments: tuple[Cursor, ...]


@dataclass(frozen=True)
class _Region:
    """A DATAFLOW region."""

    function: Function
    body: Cursor
    line: int
    processes: tuple[_Process, ...]
    bundles: Mapping[str, str]
    """The AXI master of each pointer."""

    def finding(self, message: str) -> Finding:
        return Finding(str(self.body.location.file), self.line, message)


def check_dataflow(source: Source, top: Function) -> Iterator[Finding]:
    """Check every DATAFLOW region that a kernel's top reaches, and that every block that takes one is one."""
    ports = {p.options.get("port", ""): p.options.get("bundle", "") for p in top.named("INTERFACE")}
    yield from _check_function(source, top, ports)


def _check_function(source: Source, function: Function, bundles: Mapping[str, str]) -> Iterator[Finding]:
    for block in function.inside(CursorKind.COMPOUND_STMT):
        lines = [pragma.line for pragma in function.pragmas_of(block) if pragma.name == "DATAFLOW"]
        if lines:
            yield from _check_region(source, _Region(function, block, lines[0], tuple(_processes(block)), bundles))
        else:
            yield from _check_other_block(source, function, block)
    for call, called in source.calls(function.cursor):
        if (written := source.written(called)) is not None:
            yield from _check_function(source, written, _passed_on(call, called, bundles))


def _check_region(source: Source, region: _Region) -> Iterator[Finding]:
    yield from _check_form(source, region)
    yield from _check_processes(source, region)
    for variable in variables_of(region.body):
        yield from _check_channel(region.function, variable)
    yield from _check_streams(source, region)
    yield from _check_arrays(region)
    yield from _check_pointers(region)


def _check_other_block(source: Source, function: Function, block: Cursor) -> Iterator[Finding]:
    """Check that no two statements of a block call processes: functions that are kept apart."""
    processes = [call for call, called in source.calls(block) if _is_kept_apart(source.written(called))]
    # A block around a region has the region's calls in it, too.
    if len(processes) > 1 and not any(spans(block, p.line) for p in function.named("DATAFLOW")):
        yield finding_at(block, f"{function.name}: a block that calls {len(processes)} processes has no DATAFLOW")


def _is_kept_apart(function: Function | None) -> bool:
    return function is not None and any("off" in pragma.words for pragma in function.named("INLINE"))


def _passed_on(call: Cursor, called: Cursor, bundles: Mapping[str, str]) -> dict[str, str]:
    """Return the masters of a called function's parameters."""
    pairs = zip(parameters(called), call.get_arguments(), strict=False)
    passed = {str(parameter.spelling): _variables(argument) & bundles.keys() for parameter, argument in pairs}
    return {parameter: bundles[next(iter(names))] for parameter, names in passed.items() if names}


def _check_form(source: Source, region: _Region) -> Iterator[Finding]:
    """Check that a region has the form that tools accept: declarations and calls only."""
    for statement in region.body.get_children():
        calls_own = any(source.owns(called) for _, called in source.calls(statement))
        if _call_in(statement) is None and (calls_own or statement.kind != CursorKind.DECL_STMT):
            name = region.function.name
            yield finding_at(statement, f"{name}: a DATAFLOW region may hold declarations and calls of functions only")


def _check_processes(source: Source, region: _Region) -> Iterator[Finding]:
    for _, called in source.calls(region.body):
        function = source.written(called) if called.kind == CursorKind.FUNCTION_DECL else None
        if function is not None and not _is_kept_apart(function):
            yield finding_at(called, f"the process {function.name} has no INLINE off")


def _check_channel(function: Function, variable: Cursor) -> Iterator[Finding]:
    """Check the pragmas of a stream, whose depth stands in its type, too, or of an array between two processes."""
    name, kind = str(variable.spelling), variable.type.get_canonical()
    is_array = _is_plain_array(variable)
    for needed in ("ARRAY_PARTITION" if is_array else "STREAM", "BIND_STORAGE"):
        if not _about(function, needed, name):
            yield finding_at(variable, f"{name} has no pragma {needed}")
    kind_of_storage = "ram_2p" if is_array else "fifo"
    for options in _about(function, "BIND_STORAGE", name):
        if options.get("type") != kind_of_storage:
            yield finding_at(variable, f"{name} is bound to type={options.get('type')}: it takes {kind_of_storage}")
        if "impl" not in options:
            yield finding_at(variable, f"{name} is bound without impl=")
    for options in _about(function, "ARRAY_PARTITION", name):
        if not 1 < (parts := _parts(kind, options.get("dim", "1"))) <= _MOST_PARTS:
            yield finding_at(variable, f"{name} is partitioned into {parts} parts: 2 to {_MOST_PARTS} may be")
    depth = re.search(r", (\d+)>$", kind.spelling)
    for options in _about(function, "STREAM", name):
        if depth and options.get("depth") != depth[1]:
            yield finding_at(
                variable, f"{name} has depth {depth[1]} in its type and {options.get('depth')} in its pragma"
            )


def _about(function: Function, name: str, variable: str) -> list[dict[str, str]]:
    return [p.options for p in function.named(name) if p.options.get("variable") == variable]


def _parts(array: Cursor, dimension: str) -> int:
    """Return into how many arrays a complete partition splits one; dimension 0 stands for all."""
    extents = []
    while array.kind == TypeKind.CONSTANTARRAY:
        extents.append(int(array.element_count))
        array = array.element_type
    return {"0": prod(extents), **{str(n): extent for n, extent in enumerate(extents, 1)}}.get(dimension, 1)


def _call_in(statement: Cursor) -> Cursor | None:
    """Return the call that a statement consists of."""
    while statement.kind == CursorKind.UNEXPOSED_EXPR and len(children := list(statement.get_children())) == 1:
        statement = children[0]
    is_call = statement.kind == CursorKind.CALL_EXPR and statement.referenced is not None
    return statement if is_call and statement.referenced.kind in FUNCTIONS else None


def _processes(body: Cursor) -> Iterator[_Process]:
    for statement in body.get_children():
        if (call := _call_in(statement)) is not None:
            name = f"{call.spelling} (line {call.location.line})"
            yield _Process(name, definition_of(call), tuple(call.get_arguments()))


def _check_streams(source: Source, region: _Region) -> Iterator[Finding]:
    readers: dict[str, list[str]] = defaultdict(list)
    writers: dict[str, list[str]] = defaultdict(list)
    for process in region.processes:
        for position, argument in enumerate(process.arguments):
            stream = _stream(argument)
            reads, writes = _directions(source, process.function, position) if stream else (False, False)
            if reads:
                readers[stream].append(process.name)
            if writes:
                writers[stream].append(process.name)
    for stream in _streams(region.body):
        yield from _check_ends(region, f"stream {stream}", writers[stream], readers[stream])
    # A stream that the region is given has its other end outside of the region.
    for stream in (str(p.spelling) for p in parameters(region.function.cursor) if _is_stream(p.type.get_pointee())):
        users = [*writers[stream], *readers[stream]]
        if len(users) > 1:
            yield region.finding(f"stream {stream} is used by {len(users)} processes{_listed(users)}: one may")


def _check_ends(region: _Region, channel: str, producers: list[str], consumers: list[str]) -> Iterator[Finding]:
    for what, users in (("producer", producers), ("consumer", consumers)):
        if len(users) != 1:
            yield region.finding(f"{channel} has {len(users)} {what}s{_listed(users)}: it takes one")


def _check_arrays(region: _Region) -> Iterator[Finding]:
    """Check ping-pong buffers: one process fills an array, the next one takes it as const."""
    for array in filter(_is_plain_array, variables_of(region.body)):
        users: dict[bool, list[str]] = {True: [], False: []}
        for process in region.processes:
            for parameter, argument in zip(parameters(process.function), process.arguments, strict=False):
                if array.spelling in _variables(argument):
                    users[_is_read_only(parameter.type)].append(process.name)
        yield from _check_ends(region, f"array {array.spelling}", users[False], users[True])


def _is_read_only(kind: Cursor) -> bool:
    """Return whether an array parameter of any number of dimensions is const, as a whole or in its elements."""
    inner, is_const = kind.get_canonical(), False
    while inner.kind in (TypeKind.POINTER, TypeKind.CONSTANTARRAY):
        is_const |= inner.kind == TypeKind.CONSTANTARRAY and inner.is_const_qualified()
        inner = inner.get_pointee() if inner.kind == TypeKind.POINTER else inner.element_type
    return bool(is_const or inner.is_const_qualified())


def _streams(body: Cursor) -> Iterator[str]:
    """Yield the names of the streams that a region declares; an array's streams have a name each."""
    for variable in variables_of(body):
        if _is_stream(variable.type):
            yield str(variable.spelling)
        else:
            yield from (f"{variable.spelling}[{index}]" for index in range(_num_streams(variable)))


def _num_streams(variable: Cursor) -> int:
    """Return the number of streams in an array of streams; 0 for other variables."""
    kind = variable.type.get_canonical()
    is_array = kind.kind == TypeKind.CONSTANTARRAY and _is_stream(kind.element_type)
    return int(kind.element_count) if is_array else 0


def _is_plain_array(variable: Cursor) -> bool:
    return variable.type.kind == TypeKind.CONSTANTARRAY and not _num_streams(variable)


def _is_stream(kind: Cursor) -> bool:
    spelling = str(kind.get_canonical().spelling).removeprefix("const ")
    return spelling.startswith("hls::stream<") and spelling.endswith(">")


def _stream(argument: Cursor) -> str:
    """Return the name of the stream that is passed; empty if the argument is no stream."""
    if not _is_stream(argument.type):
        return ""
    return "".join(token.spelling for token in argument.get_tokens())


def _directions(source: Source, function: Cursor, position: int) -> tuple[bool, bool]:
    """Return whether a function reads from, and writes to, the stream at this parameter."""
    stream = str(parameters(function)[position].spelling)
    reads = writes = False
    for call, called in source.calls(function):
        if (end := end_of(call)) is not None and end.spelling == stream:
            reads |= called.spelling == "read"
            writes |= called.spelling == "write"
        for index, argument in enumerate(call.get_arguments()):
            if _stream(argument) == stream and index < len(parameters(called)):
                further = _directions(source, called, index)
                reads, writes = reads or further[0], writes or further[1]
    return reads, writes


def _check_pointers(region: _Region) -> Iterator[Finding]:
    """Check pointers and masters. A master has one channel per direction: two processes on it wait for each other."""
    by_direction: dict[tuple[str, str], set[str]] = defaultdict(set)
    for parameter in parameters(region.function.cursor):
        name, kind = str(parameter.spelling), parameter.type.get_canonical()
        if kind.kind != TypeKind.POINTER:
            continue
        users = [p.name for p in region.processes if any(name in _variables(each) for each in p.arguments)]
        if len(users) != 1:
            yield region.finding(f"pointer {name} is used by {len(users)} processes{_listed(users)}: one may")
        if name in region.bundles:
            direction = "read" if kind.get_pointee().is_const_qualified() else "written"
            by_direction[region.bundles[name], direction].update(users)
    for (bundle, direction), processes in by_direction.items():
        if len(processes) > 1:
            listed = _listed(sorted(processes))
            yield region.finding(f"bundle {bundle} is {direction} by {len(processes)} processes{listed}: one may")


def _variables(expression: Cursor) -> set[str]:
    return {str(c.spelling) for c in expression.walk_preorder() if c.kind == CursorKind.DECL_REF_EXPR}


def _listed(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
