"""A kernel's source as v++ sees it: parsed by libclang with ``__SYNTHESIS__`` defined, and its pragmas."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from clang.cindex import CursorKind, Index, LinkageKind

__all__ = [
    "FUNCTIONS",
    "LOOPS",
    "Cursor",
    "Finding",
    "Function",
    "Pragma",
    "Source",
    "body_of",
    "definition_of",
    "end_of",
    "finding_at",
    "parameters",
    "spans",
    "variables_of",
]

# libclang has no type hints.
Cursor: TypeAlias = Any

FUNCTIONS = frozenset(
    {
        CursorKind.FUNCTION_DECL,
        CursorKind.FUNCTION_TEMPLATE,
        CursorKind.CXX_METHOD,
        CursorKind.CONSTRUCTOR,
        CursorKind.CONVERSION_FUNCTION,
        CursorKind.DESTRUCTOR,
    }
)
LOOPS = frozenset({CursorKind.FOR_STMT, CursorKind.WHILE_STMT, CursorKind.DO_STMT, CursorKind.CXX_FOR_RANGE_STMT})

_STANDARD = "-std=c++14"  # the default of v++
_COMPILER = os.environ.get("CXX", "c++")
_ERROR = 3  # clang's severity


@dataclass(frozen=True, order=True)
class Finding:
    """A fault in a source, with its place."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Pragma:
    """A ``#pragma HLS``.

    Attributes:
        name: Name in capitals, for instance ``PIPELINE``.
        words: Words without a value, for instance ``m_axi`` or ``off``.
        options: Options with a value; names are lower-case.
    """

    path: str
    line: int
    name: str
    words: tuple[str, ...]
    options: dict[str, str]

    @property
    def mode(self) -> str:
        """Mode of an INTERFACE, for instance ``m_axi``."""
        return next(iter(self.words), "")

    def finding(self, message: str) -> Finding:
        return Finding(self.path, self.line, message)


@dataclass(frozen=True)
class Function:
    """A function, template or instance of a template of the project, with the pragmas that are written in its body."""

    cursor: Cursor
    pragmas: list[Pragma] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.cursor.spelling)

    def named(self, name: str) -> list[Pragma]:
        """Return the pragmas of this name."""
        return [pragma for pragma in self.pragmas if pragma.name == name]

    def inside(self, *kinds: CursorKind) -> list[Cursor]:
        """Return everything in the function that is of these kinds."""
        return [cursor for cursor in self.cursor.walk_preorder() if cursor.kind in kinds]

    def pragmas_of(self, block: Cursor) -> list[Pragma]:
        """Return the pragmas in a block that are in no block inside of it."""
        inner = [c for c in block.walk_preorder() if c.kind == CursorKind.COMPOUND_STMT and c != block]
        return [p for p in self.pragmas if spans(block, p.line) and not any(spans(c, p.line) for c in inner)]


class Source:
    """A kernel's source with every header of the project that it includes.

    Args:
        path: The kernel's source.
        include: Folders with headers of the project.
        stand_ins: Folder with headers that replace the toolchain's; these are not checked.
    """

    def __init__(self, path: Path, *, include: Sequence[Path], stand_ins: Path) -> None:
        self.path = str(path)
        self._stand_ins = stand_ins
        arguments = [
            *("-x", "c++", _STANDARD, "-D__SYNTHESIS__"),
            *(f"-I{folder}" for folder in include),
            *("-isystem", str(stand_ins)),
        ]
        self._calls: dict[Cursor, list[tuple[Cursor, Cursor]]] = {}
        self._unit = Index.create().parse(self.path, args=[*arguments, "-isystem", _compiler_headers()])
        own = filter(self.owns, self._unit.cursor.get_children())
        self._cursors = [cursor for each in own for cursor in each.walk_preorder()]
        self.functions = [Function(c) for c in self._cursors if c.kind in FUNCTIONS and c.is_definition()]
        self.homeless = [pragma for pragma in _pragmas(self.path, arguments) if not self._house(pragma)]

    @property
    def errors(self) -> list[Finding]:
        """Compiler errors."""
        return [
            Finding(str(each.location.file), each.location.line, f"does not compile: {each.spelling}")
            for each in self._unit.diagnostics
            if each.severity >= _ERROR
        ]

    @property
    def tops(self) -> list[Function]:
        """Functions of the source itself (not of headers) that the linker can see."""
        return [
            function
            for function in self.functions
            if function.cursor.kind == CursorKind.FUNCTION_DECL
            and _file(function.cursor) == self.path
            and function.cursor.linkage == LinkageKind.EXTERNAL
        ]

    def constants(self) -> set[str]:
        """Return names that may stand for a number in a pragma: variables, enumerators and template parameters."""
        kinds = (CursorKind.VAR_DECL, CursorKind.ENUM_CONSTANT_DECL, CursorKind.TEMPLATE_NON_TYPE_PARAMETER)
        return {str(cursor.spelling) for cursor in self._cursors if cursor.kind in kinds}

    def owns(self, cursor: Cursor) -> bool:
        """Return whether a cursor stands in one of the project's files."""
        return cursor.location.file is not None and not cursor.location.is_in_system_header

    def is_toolchain(self, cursor: Cursor) -> bool:
        """Return whether a cursor stands in a header of the toolchain, or in a replacement for one."""
        return Path(_file(cursor)).parent == self._stand_ins

    def calls(self, cursor: Cursor) -> list[tuple[Cursor, Cursor]]:
        """Return every call in a function or statement, with the function that is called."""
        if cursor not in self._calls:
            found = (c for c in cursor.walk_preorder() if c.kind == CursorKind.CALL_EXPR and c.referenced)
            self._calls[cursor] = [(c, definition_of(c)) for c in found if c.referenced.kind in FUNCTIONS]
        return self._calls[cursor]

    def written(self, cursor: Cursor) -> Function | None:
        """Return a function with its pragmas, ``None`` if it is not the project's; for an instance, the template's."""
        place = _place(cursor)
        return next((Function(cursor, f.pragmas) for f in self.functions if _place(f.cursor) == place), None)

    def _house(self, pragma: Pragma) -> bool:
        """Assign a pragma to the innermost function around it; return whether there is one."""
        around = [f for f in self.functions if _file(f.cursor) == pragma.path and spans(f.cursor, pragma.line)]
        if around:
            max(around, key=lambda f: f.cursor.extent.start.line).pragmas.append(pragma)
        return bool(around)


def definition_of(call: Cursor) -> Cursor:
    """Return the function that is called: its definition, if the source has it."""
    return call.referenced.get_definition() or call.referenced


def parameters(function: Cursor) -> list[Cursor]:
    """Return the parameters of a function, of an instance of a template, or of a template."""
    return [child for child in function.get_children() if child.kind == CursorKind.PARM_DECL]


def end_of(call: Cursor) -> Cursor | None:
    """Return the stream that a cursor reads from or writes to; ``None`` if the cursor is no such call."""
    if call.kind != CursorKind.CALL_EXPR or call.spelling not in ("read", "write"):
        return None
    return next((c for c in call.walk_preorder() if c.kind == CursorKind.DECL_REF_EXPR), None)


def body_of(loop: Cursor) -> Cursor:
    """Return the body of a loop."""
    return list(loop.get_children())[-1]


def variables_of(block: Cursor) -> Iterator[Cursor]:
    """Yield the variables that a block declares, without those of the blocks inside of it."""
    for statement in block.get_children():
        if statement.kind == CursorKind.DECL_STMT:
            yield from (child for child in statement.get_children() if child.kind == CursorKind.VAR_DECL)


def spans(cursor: Cursor, line: int) -> bool:
    """Return whether a cursor's text has this line."""
    return bool(cursor.extent.start.line <= line <= cursor.extent.end.line)


def finding_at(cursor: Cursor, message: str) -> Finding:
    """Return a finding with the place of a cursor."""
    return Finding(str(cursor.location.file), cursor.location.line, message)


def _pragmas(path: str, arguments: Sequence[str]) -> Iterator[Pragma]:
    """Yield the pragmas of the project's files that no condition removed; libclang does not show them."""
    completed = subprocess.run([_COMPILER, "-E", *arguments, path], capture_output=True, text=True)
    file, line, is_system = path, 0, False
    for text in completed.stdout.splitlines():
        if marker := re.match(r'# (\d+) "([^"]*)"(.*)', text):
            file, line, is_system = marker[2], int(marker[1]), "3" in marker[3].split()
            continue
        if not is_system and (pragma := re.match(r"\s*#\s*pragma\s+(\w+)\s*(.*)", text)):
            yield _pragma(file, line, pragma[1], pragma[2])
        line += 1


def _pragma(path: str, line: int, family: str, text: str) -> Pragma:
    if family.upper() != "HLS":
        return Pragma(path, line, f"(not HLS) {family}", (), {})
    name, *_ = [*text.split(), ""]
    rest = text[len(name) :].split("//")[0]
    options = {key.lower(): value for key, value in re.findall(r"(\w+)\s*=\s*(\S+)", rest)}
    words = re.sub(r"\w+\s*=\s*\S+", "", rest).split()
    return Pragma(path, line, name.upper(), tuple(words), options)


@lru_cache(maxsize=1)
def _compiler_headers() -> str:
    """Return the folder of stddef.h and similar headers, which libclang does not bring."""
    found = subprocess.run([_COMPILER, "-print-file-name=include"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def _file(cursor: Cursor) -> str:
    return str(cursor.location.file) if cursor.location.file else ""


def _place(cursor: Cursor) -> tuple[str, int, str]:
    return _file(cursor), cursor.location.line, cursor.spelling
