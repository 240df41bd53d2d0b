"""Finds what mutants can change in clang-formatted C++, and writes changes that the environment switches on.

One build carries all mutants. ``MUTANT=7`` makes a process run the seventh. ``MUTANT_TRACE`` names a file that is told
which test reaches which mutant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools.mutants.sites import Site, numbered

SWITCH = """#pragma once
// Written by tools/mutants. Each file that includes it has a copy: a kernel shows the linker nothing but its table.
#include <atomic>
#include <cstdio>
#include <cstdlib>
namespace {
[[gnu::unused, gnu::noinline]] bool mutant(int number) {
    static const char* const active = std::getenv("MUTANT");
    static const char* const trace = std::getenv("MUTANT_TRACE");
    static std::atomic<unsigned long> last[1000];
    const char* const test = trace == nullptr ? nullptr : std::getenv("PYTEST_CURRENT_TEST");
    if (test != nullptr) {
        unsigned long hash = 5381;
        for (const char* c = test; *c != 0; ++c) hash = hash * 33 + static_cast<unsigned char>(*c);
        if (last[number].exchange(hash) != hash) {
            if (std::FILE* file = std::fopen(trace, "a")) {
                std::fprintf(file, "%d %s\\n", number, test);
                std::fclose(file);
            }
        }
    }
    return active != nullptr && std::atoi(active) == number;
}
}  // namespace
"""

_NO_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])\'|^[ ]*#(?:\\\n|[^\n])*',
    re.DOTALL | re.M,
)
_SCOPE = re.compile(r"\b(?:namespace|class|struct|union|enum(?: class)?)\s+([\w:]+)[^()]*$")
_FUNCTION = re.compile(r"([\w:~]+)\s*\(")
_CONTROL = frozenset({"if", "for", "while", "switch", "catch", "constexpr", "alignas", "requires", "return", "sizeof"})
_SWAPPED = {
    "comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "and/or": {"&&": "||", "||": "&&"},
    "arithmetic": {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/"},
}
_OPERATOR = re.compile(r"(?<= )(?:<=|>=|==|!=|&&|\|\||[<>+\-*/%])(?=[ \n])")
_NUMBER = re.compile(r"(?<![\w.'])\d+(?![\w.'])")
_STATEMENT = re.compile(
    r"(?<=[;{}:]\n)(?P<indent> +)(?:(?P<leave>(?:break|continue|throw\b[^;{}\n]*);)"
    r"|(?P<call>(?!assert\b)[\w:.\[\]>-]+\([^;{}\n]*\));"
    r"|(?P<assignment>[\w.\[\]>-]+ [-+|&*]?= [^;{}\n]*);)$",
    re.M,
)
_EXPRESSION = re.compile(
    r"\b(?P<condition>if|while) \(|\bfor \([^;{}()]*;|\breturn (?=[^;{}]*;)|(?<=\w) = (?=[^;={}]*;\n)", re.M
)


def cpp_sites(tree: Path, file: Path) -> Iterator[Site]:
    """Yield the sites in the functions of a file."""
    source = file.read_text()
    code = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", "\x01" if found[0][0] in "\"'" else " ", found[0]), source)
    functions = list(_functions(code))
    name = file.relative_to(tree).as_posix()

    def site(span: tuple[int, int], kind: str, change: str, replacement: str) -> Iterator[Site]:
        function = next((name for start, end, name in functions if start < span[0] < end), "")
        text = " ".join(source[slice(*span)].split())
        if function:
            lines = (source.count("\n", 0, span[0]) + 1, source.count("\n", 0, span[1]) + 1)
            start, end = (len(source[:offset].encode()) for offset in span)
            yield Site(name, function, text, kind, change, lines, (start, end), replacement)

    def found() -> Iterator[Site]:
        for match in _STATEMENT.finditer(code):
            group = match.lastgroup or ""
            span = (match.start(group), match.end())
            removed = f"if (mutant(@)) {{}} else {source[slice(*span)]}"
            yield from site(span, group, f"{source[slice(*span)]} -> nothing", removed)
        for match in _EXPRESSION.finditer(code):
            span = (match.end(), _end_of_expression(code, match.end()))
            expression, blank = source[slice(*span)], code[slice(*span)]
            is_fixed = "constexpr" in code[code.rfind("\n", 0, span[0]) + 1 : span[0]]
            if is_fixed or code[span[1]] == "," or re.search(r"[;{}?]| = |\bauto\b|\[[&=]", blank):
                continue
            if match["condition"] and not expression.startswith("!"):
                yield from site(
                    span, "negation", f"{expression} -> not", f"mutant(@) != static_cast<bool>({expression})"
                )
            for kind, token, new in _tokens(blank):
                changed = expression[: token.start()] + new + expression[token.end() :]
                change = " ".join(f"{expression} -> {changed}".split())
                yield from site(span, kind, change, f"(mutant(@) ? ({changed}) : ({expression}))")

    return numbered(found())


def _tokens(code: str) -> Iterator[tuple[str, re.Match[str], str]]:
    """Yield kind, place and replacement of what can be changed in an expression."""
    for found in _OPERATOR.finditer(code):
        for kind, swapped in _SWAPPED.items():
            if found[0] in swapped:
                yield kind, found, swapped[found[0]]
    for found in _NUMBER.finditer(code):
        yield "constant", found, str(int(found[0], 10) + 1)


def _end_of_expression(code: str, start: int) -> int:
    """Return where an expression ends: before a bracket that was open, a semicolon or a comma."""
    depth = 0
    for found in re.finditer(r"[][(){};,]", code[start:]):
        if depth == 0 and found[0] in ")]};,":
            return start + found.start()
        depth += (found[0] in "([{") - (found[0] in ")]}")
    return start


def _functions(code: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and qualified name of functions that may run mutants: they are not constexpr."""
    scopes: list[tuple[int, str, bool]] = []
    last = 0
    for brace in re.finditer(r"[;{}]", code):
        header, last = code[last : brace.start()], brace.end()
        if brace[0] == "{":
            inside = any(is_function for _, _, is_function in scopes)
            if (scope := _SCOPE.search(header)) and not inside:
                scopes.append((brace.start(), scope[1], False))
            elif (function := _FUNCTION.search(header)) and not inside and function[1] not in _CONTROL:
                fixed = re.search(r"\bconst(?:expr|eval)\b", header)
                scopes.append((brace.start(), "" if fixed else function[1], True))
            else:
                scopes.append((brace.start(), "", False))
        elif brace[0] == "}" and scopes:
            start, name, is_function = scopes.pop()
            if is_function and name:
                yield start, brace.start(), "::".join([scope for _, scope, _ in scopes if scope] + [name])


def write_switches(tree: Path, source: Path, sites: Sequence[Site | None]) -> None:
    """Write mutants into the C++ files of a tree, below the folder that the files include from, by their place."""
    (tree / source / "mutants_switch.hpp").write_text(SWITCH)
    for name in sorted({site.file for site in sites if site}):
        text = (tree / name).read_bytes()
        here = [(number, site) for number, site in enumerate(sites) if site and site.file == name]
        for number, site in sorted(here, key=lambda each: -each[1].span[0]):
            start, end = site.span
            text = text[:start] + site.replacement.replace("@", str(number)).encode() + text[end:]
        (tree / name).write_bytes(b'#include "mutants_switch.hpp"\n' + text)


def refused(output: str, sites: Sequence[Site | None]) -> Iterable[int]:
    """Return which mutants a compiler's errors are about."""
    told = {(path, int(line) - 1) for path, line in re.findall(r"^(\S+?):(\d+):\d+: error", output, re.M)}
    return [
        number
        for number, site in enumerate(sites)
        if site and any(path.endswith(site.file) and site.lines[0] <= line <= site.lines[1] for path, line in told)
    ]
