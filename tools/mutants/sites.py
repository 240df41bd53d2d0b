"""Finds the places of Python code that a mutant can change, and gives them names that survive a move of the code."""

from __future__ import annotations

import ast
import copy
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_NOT_CHANGED = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)
_NOT_WALKED = frozenset({"annotation", "returns", "decorator_list", "args", "type_params"})
_LOGGING = ("log.", "_log.", "logger.", "_logger.", "logging.", "rank_zero_")


@dataclass(frozen=True)
class Site:
    """A place in the code and one change of it.

    Attributes:
        file: Path below the tree.
        function: Qualified name of the function.
        text: The statement in one line, without what is nested in it.
        kind: Kind of change, such as "comparison".
        change: What becomes what.
        lines: First line of the statement and last line of what is changed.
        span: What is replaced: from which byte of the file up to which.
        replacement: What stands there instead.
        number: Place among the same changes of equal statements of the function.
    """

    file: str
    function: str
    text: str
    kind: str
    change: str
    lines: tuple[int, int]
    span: tuple[int, int]
    replacement: str
    number: int = 0

    @property
    def id(self) -> str:
        """A name that depends neither on lines nor on files."""
        told = "\0".join((self.function, self.text, self.kind, self.change, str(self.number)))
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    @property
    def room(self) -> str:
        """The folder of the file."""
        return Path(self.file).parent.as_posix()

    def record(self) -> dict[str, Any]:
        """Return what is kept of a chosen mutant."""
        told = {name: getattr(self, name) for name in ("file", "function", "text", "kind", "change", "number")}
        return {"id": self.id, "room": self.room, "line": self.lines[0], **told}

    def applied(self, source: bytes) -> bytes:
        """Return the changed text of the file."""
        return source[: self.span[0]] + self.replacement.encode() + source[self.span[1] :]


def numbered(sites: Iterable[Site]) -> Iterator[Site]:
    """Tell the same changes of equal statements of a file apart."""
    seen: Counter[str] = Counter()
    for site in sites:
        yield replace(site, number=seen[site.id])
        seen[site.id] += 1


class Index:
    """Sites of a tree, by what they are called."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._by_id: defaultdict[str, list[Site]] = defaultdict(list)
        for site in sites:
            self._by_id[site.id].append(site)

    def find(self, record: dict[str, Any]) -> Site | None:
        """Return the site of a chosen mutant: in its file, or in the only one that has it; None if it is gone."""
        found = self._by_id[record["id"]]
        here = [site for site in found if site.file == record["file"]] or found
        return here[0] if len(here) == 1 else None

    def choose(self, count: int, rng: random.Random, known: Iterable[Site]) -> list[Site]:
        """Choose among known sites with a name of their own, one of a statement, by the number of statements in rooms.

        Within a room each kind of change is as likely as the others.
        """
        rooms: defaultdict[str, list[Site]] = defaultdict(list)
        for site in sorted(known, key=lambda site: site.id):
            if len(self._by_id[site.id]) == 1:
                rooms[site.room].append(site)
        weights = {room: len({(site.file, site.lines[0]) for site in rooms[room]}) for room in sorted(rooms)}
        chosen: list[Site] = []
        while len(chosen) < count and weights:
            room = rng.choices(list(weights), list(weights.values()))[0]
            kind = rng.choice(sorted({site.kind for site in rooms[room]}))
            one = rng.choice([site for site in rooms[room] if site.kind == kind])
            chosen.append(one)
            rooms[room] = [s for s in rooms[room] if (s.file, s.lines[0]) != (one.file, one.lines[0])]
            if not rooms[room]:
                del weights[room]
        return chosen


def python_sites(tree: Path, file: Path) -> Iterator[Site]:
    """Yield the sites in the functions of a module."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    name = file.relative_to(tree).as_posix()

    def found() -> Iterator[Site]:
        for function, statement, node, kind, new in _changes(ast.parse(source)):
            lost = "\n" * (node.end_lineno - node.lineno)
            new_text = ast.unparse(new)
            old_text = _header(node)
            yield Site(
                file=name,
                function=function,
                text=_header(statement),
                kind=kind,
                change=f"{old_text} -> {new_text}",
                lines=(statement.lineno, node.end_lineno),
                span=(starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset),
                # The lines after it keep their numbers.
                replacement=f"({new_text}{lost})" if isinstance(node, ast.expr) else new_text + lost,
            )

    return numbered(found())


def _header(node: ast.AST) -> str:
    """Return code in one line, without the statements that are nested in it."""
    shallow = copy.copy(node)
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        if isinstance(getattr(node, name, None), list):
            setattr(shallow, name, [])
    return ast.unparse(shallow).strip()


_Change = tuple[str, Any, Any, str, ast.AST]


def _changes(node: ast.AST, names: str = "", function: str = "", statement: ast.AST | None = None) -> Iterator[_Change]:
    """Yield function, statement, node, kind of change and what is to replace the node."""
    if isinstance(node, _NOT_CHANGED) or (isinstance(node, ast.Call) and ast.unparse(node.func).startswith(_LOGGING)):
        return
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Await | ast.Yield | ast.YieldFrom):
        return
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        names = f"{names}.{node.name}".lstrip(".")
        function = function if isinstance(node, ast.ClassDef) else names
    elif isinstance(node, ast.stmt):
        statement = node
    if function and statement is not None:
        for kind, old, new in _of_node(node):
            yield function, statement, old, kind, new
    for field, value in ast.iter_fields(node):
        skipped = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and field == "body"
        if skipped or (field in _NOT_WALKED and not isinstance(node, ast.Call)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, names, function, statement)


def _of_node(node: Any) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield kind, what is replaced, and by what."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            yield "comparison", node, _with(node, ops=[_SWAPPED[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and/or", node, _with(node, op=_SWAPPED[type(op)]())
        case ast.BinOp(op=op) if type(op) in _SWAPPED and not _is_text(node.left) and not _is_text(node.right):
            yield "arithmetic", node, _with(node, op=_SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", node, node.operand
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "constant", node, ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", node, ast.Return(ast.Constant(None))
        case ast.Break() | ast.Continue() | ast.Raise():
            yield "leave", node, ast.Pass()
        case ast.Expr(value=ast.Call() as call) if not ast.unparse(call.func).startswith(_LOGGING):
            yield "call", node, ast.Pass()
        case ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "assignment", node, ast.Pass()
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.UnaryOp | ast.Constant):
        yield "negation", node.test, ast.UnaryOp(ast.Not(), node.test)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
