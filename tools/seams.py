"""Writes docs/seams.md: what the tests marked ``seam`` hold, what for, and which modules of ours rely on it.

    python tools/seams.py [--check]  # --check writes nothing, and fails if the page is another one

The mark has the purpose. What stays true is in the test's docstring, and in the mark's second argument, if it has one.
Modules are those that define what the purpose names, or else those that use the rarest of the test's names. Prints
contract tests without a mark, rows without a module, and private names of libraries without a contract test.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["page_of"]

PAGE = Path(__file__).parents[1] / "docs/seams.md"
TOP = """\
# Seams to DeepSpeed, Lightning and transformers

This package relies on private names of DeepSpeed, Lightning, torch, transformers and accelerate, and on the order in
which they call each other. Each row has what must stay true, the purpose, the modules of ours that rely on it most, and
the test that fails when it changes, and then prints the row. Modules are below `lightning_smartinfinity/`, tests below
`tests/`. `python tools/seams.py` writes this page from the tests that are marked `seam`; `make contracts` checks it.
"""
TABLE = "| what stays true | for | used in | held by |\n|---|---|---|---|\n"
LIBRARIES = {"accelerate", "deepspeed", "lightning", "torch", "transformers"}
NOT_THEIRS = {"_current_frames", "_getframe", "_replace"}  # documented by Python, or our own under a computed name
PRIVATE = re.compile(r"_+[A-Za-z]\w*(?<!__)")
CODE = re.compile(
    r"(`+)(?P<code>.+?)\1"
    r"|\b(?!(?:DeepSpeed|ZeRO)\b)(?=[\w.]*?(?:_|\w\.[\w*]|[a-z][A-Z]))[A-Za-z_]\w*(?:\.\w+)*(?:\.?\*)?(?:\([^)]*\))?"
)


def main() -> None:
    """Write the page of this checkout, or check it."""
    page, problems = page_of(PAGE.parents[1])
    if "--check" not in sys.argv:
        PAGE.write_text(page)
    elif page != PAGE.read_text():
        problems.append("docs/seams.md is not what the tests say: run python tools/seams.py")
    sys.exit("\n".join(problems) or None)


def page_of(root: Path) -> tuple[str, list[str]]:
    """Return the page of a checkout, and what its tests lack."""
    users, homes, foreign = _package(root / "lightning_smartinfinity")
    page, problems, held = TOP, [], set()
    for file, tree in _parsed(root / "tests", "test_*.py"):
        is_contract, rows = file.startswith("zero3/test_contract"), ""
        held |= {*_names(tree)} if is_contract else set()
        for test in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
            calls = [each for each in test.decorator_list if isinstance(each, ast.Call)]
            marks = [map(ast.literal_eval, call.args) for call in calls if ast.unparse(call.func) == "pytest.mark.seam"]
            if is_contract and not marks:
                problems.append(f"tests/{file}: {test.name} needs pytest.mark.seam with its purpose")
            for purpose, *more in marks:
                purpose, added, statement = _coded(purpose), _coded(*more), _coded(ast.get_docstring(test) or "")
                names = {*_told(added)}
                names |= {*_told(statement), *filter(PRIVATE.fullmatch, _names(test))} if is_contract else set()
                held |= names
                known = [modules for name in names if (modules := homes.get(name) or users.get(name))]
                rarest = [modules for modules in known if len(modules) == min(map(len, known))]
                modules = set().union(*(homes.get(name, ()) for name in _told(purpose))) or set().union(*rarest)
                if not modules:
                    problems.append(f"tests/{file}: {test.name} and its purpose name nothing that the package has")
                cases = re.findall(r"parametrize\('name', \[(.*?)]", "".join(map(ast.unparse, calls)))
                told = " ".join(filter(None, [statement, added, *(each.replace("'", "`") for each in cases)]))
                where = ", ".join(f"`{each}`" for each in sorted(modules))
                rows += f"| {told} | {purpose} | {where} | `{file}::{test.name}` |\n"
        page += f"\n## {file}\n\n{_coded(ast.get_docstring(tree) or '')}\n\n{TABLE}{rows}" if rows else ""
    for name in sorted(foreign - held):
        problems.append(f"{name} of {', '.join(sorted(users[name]))} needs a test in tests/zero3/test_contract_*.py")
    return page, problems


def _package(folder: Path) -> tuple[dict[str, set[str]], dict[str, set[str]], set[str]]:
    """Return which modules mention and define a name, and the private names that the package does not define."""
    users, homes, used, ours = defaultdict(set), defaultdict(set), set(), set(NOT_THEIRS)
    for module, tree in _parsed(folder, "*.py"):
        for name in _names(tree):
            users[name].add(module)
        for top in tree.body:
            homes[getattr(top, "name", "")].add(module)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(getattr(node, "ctx", None), ast.Store):
                ours.add(ast.unparse(node).removeprefix("self."))
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
                used |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
    return users, homes, {*filter(PRIVATE.fullmatch, used - ours)}


def _coded(text: str = "") -> str:
    """Put what looks like code in backticks."""
    return CODE.sub(lambda match: f"`{match['code'] or match[0]}`", " ".join(text.split()))


def _told(text: str) -> Iterator[str]:
    """Yield of each word in backticks the last name, and the private ones before it."""
    for word in re.findall(r"`([^`]+)`", text):
        *path, last = re.findall(r"\w+", word.split("(")[0])
        yield from [*filter(PRIVATE.fullmatch, path), last]


def _parsed(folder: Path, pattern: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob(pattern)):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text())


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield all names in code and in its texts; of texts with spaces the private ones."""
    for node in ast.walk(tree):
        for text in (getattr(node, field, None) for field in ("attr", "id", "name", "arg", "module", "value")):
            words = re.findall(r"\w+", text) if isinstance(text, str) else []
            yield from filter(PRIVATE.fullmatch, words) if " " in str(text) else words


if __name__ == "__main__":
    main()
