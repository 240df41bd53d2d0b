"""Checks DATAFLOW: one producer and consumer per stream, one process per pointer, one reader and writer per master."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from clang.cindex import CursorKind, TypeKind

from hls.lint.source import FUNCTIONS, Cursor, Finding, Function, Source, parameters, variables_of

__all__ = ["check_dataflow"]


@dataclass(frozen=True)
class _Process:
    """A call in a DATAFLOW region."""

    name: str
    function: Cursor
    arguments: tuple[Cursor, ...]

    @property
    def variables(self) -> set[str]:
        return {name for argument in self.arguments for name in _variables(argument)}


@dataclass(frozen=True)
class _Region:
    """A DATAFLOW region."""

    function: Cursor
    line: int
    processes: tuple[_Process, ...]
    bundles: Mapping[str, str]
    """The AXI master of each pointer."""

    def finding(self, message: str) -> Finding:
        return Finding(str(self.function.location.file), self.line, message)


def check_dataflow(source: Source, top: Function) -> Iterator[Finding]:
    """Check every DATAFLOW region that a kernel's top reaches."""
    ports = {p.options.get("port", ""): p.options.get("bundle", "") for p in top.named("INTERFACE")}
    yield from _check_function(source, top.cursor, ports)


def _check_function(source: Source, function: Cursor, bundles: Mapping[str, str]) -> Iterator[Finding]:
    written = source.written(function)
    for pragma in written.named("DATAFLOW") if written else []:
        blocks = [c for c in Function(function).around(pragma.line) if c.kind == CursorKind.COMPOUND_STMT]
        body = blocks[-1]
        yield from _check_form(source, function, body)
        region = _Region(function, pragma.line, tuple(_processes(body)), bundles)
        yield from _check_streams(source, region, body)
        yield from _check_arrays(region, body)
        yield from _check_pointers(region)
    for call, called in source.calls(function):
        if source.owns(called):
            yield from _check_function(source, called, _passed_on(call, called, bundles))


def _passed_on(call: Cursor, called: Cursor, bundles: Mapping[str, str]) -> dict[str, str]:
    """Return the masters of a called function's parameters."""
    pairs = zip(parameters(called), call.get_arguments(), strict=False)
    passed = {str(parameter.spelling): _variables(argument) & bundles.keys() for parameter, argument in pairs}
    return {parameter: bundles[next(iter(names))] for parameter, names in passed.items() if names}


def _check_form(source: Source, function: Cursor, body: Cursor) -> Iterator[Finding]:
    """Check that a region has the form that tools accept: declarations and calls only."""
    for statement in body.get_children():
        calls = (c.referenced for c in statement.walk_preorder() if c.kind == CursorKind.CALL_EXPR and c.referenced)
        is_declaration = statement.kind == CursorKind.DECL_STMT and not any(map(source.owns, calls))
        if not is_declaration and _call_in(statement) is None:
            message = f"{function.spelling}: a DATAFLOW region may hold declarations and calls of functions only"
            yield Finding(str(statement.location.file), statement.location.line, message)


def _call_in(statement: Cursor) -> Cursor | None:
    """Return the call that a statement consists of."""
    while statement.kind == CursorKind.UNEXPOSED_EXPR and len(children := list(statement.get_children())) == 1:
        statement = children[0]
    is_call = statement.kind == CursorKind.CALL_EXPR and statement.referenced is not None
    return statement if is_call and statement.referenced.kind in FUNCTIONS else None


def _processes(body: Cursor) -> Iterator[_Process]:
    for statement in body.get_children():
        if (call := _call_in(statement)) is not None:
            function = call.referenced.get_definition() or call.referenced
            yield _Process(f"{call.spelling} (line {call.location.line})", function, tuple(call.get_arguments()))


def _check_streams(source: Source, region: _Region, body: Cursor) -> Iterator[Finding]:
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
    for stream in _streams(body):
        yield from _check_ends(region, f"stream {stream}", writers[stream], readers[stream])
    # A stream that the region is given has its other end outside of the region.
    for stream in (str(p.spelling) for p in parameters(region.function) if _is_stream(p.type.get_pointee())):
        users = [*writers[stream], *readers[stream]]
        if len(users) > 1:
            yield region.finding(f"stream {stream} is used by {len(users)} processes{_listed(users)}: one may")


def _check_ends(region: _Region, channel: str, producers: list[str], consumers: list[str]) -> Iterator[Finding]:
    for what, users in (("producer", producers), ("consumer", consumers)):
        if len(users) != 1:
            yield region.finding(f"{channel} has {len(users)} {what}s{_listed(users)}: it takes one")


def _check_arrays(region: _Region, body: Cursor) -> Iterator[Finding]:
    """Check ping-pong buffers: one process fills an array, the next one takes it as const."""
    for array in (v for v in variables_of(body) if v.type.kind == TypeKind.CONSTANTARRAY and not _num_streams(v)):
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
        if _receiver(call) == stream:
            reads |= called.spelling == "read"
            writes |= called.spelling == "write"
            continue
        for index, argument in enumerate(call.get_arguments()):
            if _stream(argument) == stream and index < len(parameters(called)):
                further = _directions(source, called, index)
                reads, writes = reads or further[0], writes or further[1]
    return reads, writes


def _receiver(call: Cursor) -> str:
    """Return the variable whose method is called."""
    first = next(call.get_children(), None)
    if first is None or call.referenced.kind != CursorKind.CXX_METHOD:
        return ""
    owner = next(first.get_children(), None) if first.kind == CursorKind.MEMBER_REF_EXPR else first
    return str(owner.spelling) if owner is not None else ""


def _check_pointers(region: _Region) -> Iterator[Finding]:
    """Check pointers and masters. A master has one channel per direction: two processes on it wait for each other."""
    by_direction: dict[tuple[str, str], set[str]] = defaultdict(set)
    for parameter in parameters(region.function):
        name, kind = str(parameter.spelling), parameter.type.get_canonical()
        if kind.kind != TypeKind.POINTER:
            continue
        users = [process.name for process in region.processes if name in process.variables]
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
