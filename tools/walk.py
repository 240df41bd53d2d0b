"""Counts what a reader walks through: lines, rooms, arrows between them, and the files that a training step passes.

    python tools/walk.py           # lines, and the import graph of the package
    python tools/walk.py --step    # and a training step, a gradient and the set-up, by running them

A room is a package, and an arrow leads from a room to one that it imports. A change of file is a call whose caller and
callee lie in different files of the package. The step is the third of a Fabric loop with eight parameters in one
tasklet and ``overlap="none"``. The one circle of modules is ``__init__`` and ``_autoload``, which import each other
within functions.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_smartinfinity"
SMALL_FILE = 130


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", action="store_true", help="run a training, too")
    run = parser.parse_args().step
    for name, value in (size_figures() | graph_figures() | (step_figures() if run else {})).items():
        sys.stdout.write(f"{name}: {value}\n")


def size_figures() -> dict[str, int]:
    """Return lines of the package and of its tests, statements of the tests, and words of the walk's page."""
    package, tests = ROOT / PACKAGE, ROOT / "tests"
    trees = [ast.parse(path.read_text()) for path in tests.rglob("*.py")]
    return {
        "lines of Python": sum(map(length, package.rglob("*.py"))),
        "lines of C++": sum(length(path) for end in ("cpp", "hpp", "inl") for path in package.rglob(f"*.{end}")),
        "lines of tests in Python": sum(map(length, tests.rglob("*.py"))),
        "statements of tests": sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree)),
        "words of docs/architecture.md": len((ROOT / "docs/architecture.md").read_text().split()),
    }


def graph_figures() -> dict[str, int]:
    """Return figures of the import graph; imports for type checkers alone are none."""
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
    files = {name: path for name in graph.modules if (path := file_of(name)) is not None}
    imports = {name: graph.find_modules_directly_imported_by(name) & files.keys() for name in files}
    importers = Counter(imported for found in imports.values() for imported in found)
    arrows = {(room_of(a, files), room_of(b, files)) for a, found in imports.items() for b in found}
    once = [name for name in files if importers[name] == 1 and length(files[name]) < SMALL_FILE]
    return {
        "modules at the root": sum(path.parent == ROOT / PACKAGE for path in files.values()),
        "rooms": len({path.parent for path in files.values()}),
        "arrows between rooms": sum(a != b for a, b in arrows),
        "circles of modules": len(circles(imports)),
        f"files with one importer and fewer than {SMALL_FILE} lines": len(once),
    }


def file_of(module: str) -> Path | None:
    """Return the file of a module of the package, if it is written in Python."""
    path = ROOT / Path(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


def room_of(module: str, files: dict[str, Path]) -> Path:
    """Return the folder of a module."""
    return files[module].parent


def length(file: Path) -> int:
    """Return the number of lines of a file."""
    return len(file.read_text().splitlines())


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return sets of modules that import each other, directly or not."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        seen, waiting = set(), list(imports[start])
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += imports[module]
        reached[start] = seen
    found = {frozenset({a, *(b for b in reached[a] if a in reached[b])}) for a in imports if a in reached[a]}
    return [set(each) for each in found]


@dataclass
class Walk:
    """What calls passed within a context."""

    files: set[str] = field(default_factory=set)
    changes: Counter[str] = field(default_factory=Counter)


@contextmanager
def walking() -> Iterator[Walk]:
    """Count the calls of this thread within the package."""
    walk, inside = Walk(), str(ROOT / PACKAGE)

    def note(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(inside) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        walk.files.add(file)
        caller = frame.f_back
        if caller is None or not caller.f_code.co_filename.startswith(inside):
            return
        before = caller.f_code.co_filename
        walk.changes["file"] += file != before
        walk.changes["room"] += Path(file).parent != Path(before).parent
        walk.changes["class"] += class_of(frame) != class_of(caller)

    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def class_of(frame: Any) -> str:
    """Return the class whose method a frame runs, or its file."""
    name = re.sub(r"\.<locals>.*", "", getattr(frame.f_code, "co_qualname", ""))
    return name.rpartition(".")[0] or str(frame.f_code.co_filename)


def step_figures() -> dict[str, int]:
    """Return figures of the set-up and of the third step of a training."""
    import lightning as L
    import torch

    from lightning_smartinfinity import SmartInfinityFabricStrategy

    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    count = len(list(net.parameters()))
    with tempfile.TemporaryDirectory() as folder:
        with walking() as setup:
            strategy = SmartInfinityFabricStrategy(folder, overlap="none")
            fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
            fabric.launch()
            model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
        batch = torch.ones(2, 8)
        for _ in range(3):
            with walking() as forward:
                loss = model(batch).square().mean()
            with walking() as backward:
                fabric.backward(loss)
            with walking() as stepping:
                optimizer.step()
                optimizer.zero_grad()
        strategy.close()
    parts = (forward, backward, stepping)
    whole = {
        f"changes of {kind} in a step": sum(part.changes[kind] for part in parts) for kind in ("file", "room", "class")
    }
    return {
        "files touched at set-up": len(setup.files),
        "files touched in a step": len(set().union(*(part.files for part in parts))),
        **whole,
        "changes of file in forward": forward.changes["file"],
        "changes of file for each gradient": round(backward.changes["file"] / count),
        "changes of file in the update": stepping.changes["file"],
    }


if __name__ == "__main__":
    main()
