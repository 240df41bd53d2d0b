"""Measures how easy the code is to walk, room by room (a room is a folder of source files).

    python tools/house.py                      # this checkout
    python tools/house.py --against ../before  # beside another checkout of the project
    python tools/house.py --sample 60          # docstrings picked at random, to be read cold
    python tools/house.py --untested           # modules of the package that no test imports by name

Lengths of C++ functions come from matching braces in clang-formatted code, which is exact enough for percentiles.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import statistics
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_smartinfinity"
PRODUCT = (PACKAGE, "hls")
CPP = frozenset({".cpp", ".hpp", ".inl"})

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
_NO_FUNCTION = re.compile(r"\b(namespace|class|struct|enum|union|extern)\b[^()]*$")
_DEFINED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})


@dataclass
class Room:
    """The figures of one folder."""

    files: int = 0
    lines: int = 0
    code: int = 0
    functions: list[int] = field(default_factory=list)
    any_names: int = 0

    def add(self, other: Room) -> None:
        """Add the figures of another room."""
        self.files += other.files
        self.lines += other.lines
        self.code += other.code
        self.functions += other.functions
        self.any_names += other.any_names

    @property
    def p90(self) -> float:
        """Lines of the function that nine tenths of the room's functions do not exceed."""
        if len(self.functions) < 2:
            return float(sum(self.functions))
        return statistics.quantiles(self.functions, n=10, method="inclusive")[-1]

    def row(self) -> str:
        """Return the figures as columns of a table."""
        lengths = self.functions or [0]
        return (
            f"{self.files:5} {self.lines:6} {self.code:6} {len(self.functions):5} {statistics.median(lengths):6.1f}"
            f" {self.p90:6.1f} {max(lengths):4} {self.any_names:4}"
        )


HEADER = "files  lines   code  func median    p90  max  Any"


def git(root: Path, *arguments: str | Path) -> list[str]:
    """Return the lines that a command of git prints."""
    command = ["git", *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


def sources(root: Path, *folders: str) -> Iterator[Path]:
    """Yield source files that git tracks, by default the product's: what the build generates does not count."""
    for name in git(root, "ls-files", *(folders or PRODUCT)):
        path = root / name
        if path.suffix in CPP or path.suffix in {".py", ".pyi"}:
            yield path


def python_files(root: Path, folder: str) -> list[Path]:
    """List the Python files of a folder that git tracks."""
    return [path for path in sources(root, folder) if path.suffix == ".py"]


def code_lines(text: str, suffix: str) -> set[int]:
    """Return the numbers of the lines of a file that are neither empty nor comments nor docstrings."""
    if suffix in CPP:
        return {number for number, line in enumerate(_bare(text).splitlines(), 1) if line.strip()}
    documented = set[int]()
    for node in docstrings(ast.parse(text)):
        documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in _NO_CODE and token.string]
    return {line for first, last in spans for line in range(first, last + 1)} - documented


def python_room(text: str) -> Room:
    """Measures a Python file."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Room(
        files=1,
        lines=text.count("\n"),
        code=len(code_lines(text, ".py")),
        functions=[(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions],
        any_names=sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree)),
    )


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of a tree, and the strings that stand below attributes in their place."""
    for node in ast.walk(tree):
        for before, statement in zip([None, *body_of(node)], body_of(node), strict=False):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            describes = isinstance(before, ast.Assign | ast.AnnAssign) or (
                before is None and isinstance(node, _DEFINED)
            )
            if describes and isinstance(statement.value.value, str):
                yield statement.value


def body_of(node: ast.AST) -> list[ast.stmt]:
    """Return the statements of a node that may hold docstrings."""
    return node.body if isinstance(node, _DEFINED) else []


def cpp_room(text: str) -> Room:
    """Measures a C++ file."""
    functions = list(cpp_functions(_bare(text)))
    return Room(files=1, lines=text.count("\n"), code=len(code_lines(text, ".cpp")), functions=functions)


def _bare(text: str) -> str:
    """Return C++ without comments and without what strings hold."""
    return _COMMENT.sub(lambda match: '""' if match[0][0] in "\"'" else "\n" * match[0].count("\n"), text)


def cpp_functions(bare: str) -> Iterator[int]:
    """Yield the lengths, in lines, of the functions in C++ without comments and strings."""
    line, opened, head, depth_in_function, began = 1, list[bool](), "", 0, 0
    for char in bare:
        line += char == "\n"
        if char == "{":
            is_function = depth_in_function == 0 and "(" in head and not _NO_FUNCTION.search(head)
            opened.append(is_function)
            if is_function:
                began = line - head.lstrip().count("\n")
            depth_in_function += is_function or depth_in_function > 0
            head = ""
        elif char == "}":
            is_function = bool(opened) and opened.pop()
            depth_in_function -= depth_in_function > 0
            if is_function:
                yield line - began + 1
            head = ""
        elif char == ";":
            head = ""
        else:
            head += char


def rooms(root: Path) -> dict[str, Room]:
    """Measures every folder of the product's sources."""
    found = defaultdict[str, Room](Room)
    for path in sources(root):
        text = path.read_text()
        measured = cpp_room(text) if path.suffix in CPP else python_room(text)
        found[str(path.parent.relative_to(root))].add(measured)
    return dict(sorted(found.items()))


def names_in(source: str) -> set[str]:
    """Return what a file imports, and its strings: some modules are imported, or patched, by a string."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def untested(root: Path) -> list[str]:
    """List the package's modules that have functions and that no file below tests/ names."""
    named = set[str]().union(*(names_in(path.read_text()) for path in python_files(root, "tests")))
    modules = [path for path in python_files(root, PACKAGE) if re.search(r"^ *def ", path.read_text(), re.MULTILINE)]
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts) for path in sorted(modules) if path.stem != "__init__"
    ]
    return [name for name in names if name not in named]


def sample(root: Path, count: int, seed: int) -> Iterator[str]:
    """Yield docstrings of the package picked at random, each after its file and line."""
    found = []
    for path in python_files(root, PACKAGE):
        found += [(path.relative_to(root), node) for node in docstrings(ast.parse(path.read_text()))]
    found.sort(key=lambda item: (str(item[0]), item[1].lineno))
    for path, node in random.Random(seed).sample(found, min(count, len(found))):
        yield f"{path}:{node.lineno}: {str(node.value).strip()}\n"


def folded(now: dict[str, Room], before: dict[str, Room]) -> dict[str, Room]:
    """Add up rooms by those of another checkout: a new room counts towards the old one that it lies in."""
    sums = defaultdict[str, Room](Room)
    for name, room in now.items():
        path = Path(name)
        sums[next((str(place) for place in (path, *path.parents) if str(place) in before), name)].add(room)
    return sums


def table(measured: dict[str, Room]) -> Iterator[str]:
    """Yield a line for each room and one for all of them."""
    total = Room()
    yield f"{'room':44} {HEADER}"
    for name, room in measured.items():
        total.add(room)
        yield f"{name:44} {room.row()}"
    yield f"{'all':44} {total.row()}"


def comparison(now: dict[str, Room], before: dict[str, Room]) -> Iterator[str]:
    """Yield the rooms of another checkout, each above what it has become here."""
    sums = folded(now, before)
    yield f"{'room':44} {HEADER}"
    for name, room in before.items():
        after = sums.get(name, Room())
        yield f"{name + ', before':44} {room.row()}"
        above = "  p90 above before" if after.p90 > room.p90 else ""
        yield f"{'  now, with the rooms cut from it':44} {after.row()}{above}"


def report(root: Path, against: Path | None) -> Iterator[str]:
    """Yield the figures of this checkout, and those of another one below them."""
    now = rooms(root)
    yield from table(now)
    yield f"modules that no test imports by name: {len(untested(root))}"
    if against is not None:
        yield "\nBefore:"
        before = rooms(against)
        yield from table(before)
        yield f"modules that no test imports by name: {len(untested(against))}\n"
        yield from comparison(now, before)


def main() -> None:
    """Print the report, or the list that an option asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, printed below each room")
    parser.add_argument("--sample", type=int, metavar="N", help="print N docstrings picked at random instead")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    parser.add_argument("--untested", action="store_true", help="list the modules that no test imports instead")
    arguments = parser.parse_args()
    if arguments.sample is not None:
        lines: Iterator[str] = sample(ROOT, arguments.sample, arguments.seed)
    elif arguments.untested:
        lines = iter(untested(ROOT))
    else:
        lines = report(ROOT, arguments.against)
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
