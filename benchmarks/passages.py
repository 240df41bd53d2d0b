"""A text task made from installed packages: which package does this passage of documentation come from?

Passages are the beginnings of docstrings. The package's own name is masked. The passages of one file are either all
used for training or all held out.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("matplotlib", "networkx", "numpy", "sympy", "torch", "transformers")
SHORTEST, LONGEST = 100, 400  # characters
HELD_OUT_SHARE = 3  # one file in this many is held out


@dataclass(frozen=True)
class Task:
    """Passages, each with the number of its package.

    Args:
        packages: Packages by number.
        training: Passages for training, shuffled.
        tuning: Other passages of the same files, for choosing settings.
        held_out: Passages of other files.
    """

    packages: tuple[str, ...]
    training: list[tuple[str, int]]
    tuning: list[tuple[str, int]]
    held_out: list[tuple[str, int]]


def task(names: Sequence[str], *, per_package: int, tuning_per_package: int, held_out_per_package: int) -> Task:
    """Collect passages of the installed packages, up to these numbers; the same versions give the same passages."""
    packages = tuple(name for name in names if importlib.util.find_spec(name) is not None)
    training: list[tuple[str, int]] = []
    tuning: list[tuple[str, int]] = []
    held_out: list[tuple[str, int]] = []
    for number, name in enumerate(packages):
        kept, aside = _passages_of(name)
        chosen = [(passage, number) for passage in _some(kept, per_package + tuning_per_package)]
        training += chosen[tuning_per_package:]
        tuning += chosen[:tuning_per_package]
        held_out += [(passage, number) for passage in _some(aside, held_out_per_package)]
    random.Random(0).shuffle(training)
    return Task(packages, training, tuning, held_out)


def _some(passages: list[str], number: int) -> list[str]:
    return random.Random(0).sample(sorted(passages), min(number, len(passages)))


def _passages_of(package: str) -> tuple[list[str], list[str]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    kept: set[str] = set()
    aside: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        is_held_out = _number_of(str(path.relative_to(root))) % HELD_OUT_SHARE == 0
        (aside if is_held_out else kept).update(_paragraphs(path, package))
    return sorted(kept - aside), sorted(aside)


def _number_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def _paragraphs(path: Path, package: str) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    name = re.compile(re.escape(package), re.IGNORECASE)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = " ".join((ast.get_docstring(node) or "").partition(">>>")[0].split())
            if len(text) >= SHORTEST:
                yield name.sub("[MASK]", text[:LONGEST])
