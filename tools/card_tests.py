"""Decides whether the tests of cards have to run: whether a file that they depend on has changed.

    python -m tools.card_tests [yes|no|auto] [--base COMMIT]

Prints options for pytest on stdout: none if the tests run, otherwise those that leave out their folders. Prints the
decision and its reason on stderr. With ``auto``, which is the default, the files that differ from the base decide,
committed or not. The base is the merge base with ``origin/main``, or with ``main`` if there is no remote. If that is
the current commit, or there is none, the base is unknown, and the tests run.

The tests depend on:

- the files of their own folders and of ``hls/``;
- the Python modules of ``devices/smartssd``, of ``cli/smartssd`` and of these folders, the modules that import
  ``devices/smartssd``, and what all these import. Rooms above ``pipeline/`` are not followed further, because they
  import nearly the whole package, and their own tests always run;
- the rooms of the core that ``card/`` includes, and ``module/``, which binds it;
- the files that build and start all this, a page that they compare with a script, and a benchmark's model.

A file that no longer exists counts, too, because nothing shows which files used it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

from tools.include_contracts import HLS, SOURCES, files, includes

__all__ = ["TESTS", "concerns_cards", "decide", "dependencies"]

TESTS = ("tests/smartssd", "tests/hls", "tests/xrt")
"""Folders of the tests of cards."""

_PACKAGE = "lightning_smartinfinity"
_WING = (f"{_PACKAGE}.devices.smartssd", f"{_PACKAGE}.cli.smartssd")
_ABOVE = ("cli", "integrations", "planning", "export", "resume", "zero3", "activations")
_OTHERS = {
    ".ci/run",
    "CMakeLists.txt",
    "Makefile",
    "benchmarks/gpt2.py",
    "constraints-dev.txt",
    "docs/smartssd_kernels.md",
    "pyproject.toml",
    "tests/conftest.py",
    "tools/card_tests.py",
    "tools/generate_update_rules.py",
    "tools/include_contracts.py",
    "tools/system_packages.sh",
    "tools/test_packages.sh",
}


def main() -> None:
    """Print the options for pytest, and the reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wanted", nargs="?", choices=("yes", "no", "auto"), default="auto")
    parser.add_argument("--base", help="commit whose tests have passed (default: the merge base with origin/main)")
    options = parser.parse_args()
    root = Path(__file__).parents[1]
    if options.wanted == "auto":
        runs, reason = decide(root, options.base)
    else:
        runs, reason = options.wanted == "yes", "as asked"
    sys.stderr.write(f"tests of cards: {'run' if runs else 'left out'}, {reason}\n")
    sys.stdout.write("" if runs else " ".join(f"--ignore={folder}" for folder in TESTS))


def decide(root: Path, base: str | None = None) -> tuple[bool, str]:
    """Return whether the tests of cards have to run, and why.

    Args:
        root: Checkout.
        base: Commit whose tests have passed; None: the merge base with ``origin/main``, or with ``main``. A word that
            git does not know is an unknown base.
    """
    base = base or _base(root)
    changed = None if base is None else _changed(root, base)
    if base is None or changed is None:
        return True, f"as {base or 'the last landed commit'} is unknown here"
    known = dependencies(root)
    relevant = [path for path in changed if concerns_cards(path, known, root)]
    if relevant:
        more = f" and {len(relevant) - 1} more files that they depend on" if relevant[1:] else ""
        return True, f"as {relevant[0]}{more} changed since {base[:8]}"
    return False, f"as none of the {len(known)} files that they depend on changed since {base[:8]}"


def concerns_cards(path: str, known: Iterable[str], root: Path) -> bool:
    """Return whether a changed path is a file that the tests of cards depend on, or may have been one.

    Args:
        path: Path in the checkout.
        known: Result of :func:`dependencies`.
        root: Checkout.
    """
    if path in known or Path(path).is_relative_to(HLS) or any(Path(path).is_relative_to(each) for each in TESTS):
        return True
    return not (root / path).exists() and Path(path).parts[0] in (_PACKAGE, "tests", "tools")


def dependencies(root: Path) -> set[str]:
    """Return the paths of the files that the tests of cards depend on, apart from those in ``hls/`` and their own."""
    return {*_OTHERS, *_modules(root), *_sources(root)}


def _modules(root: Path) -> Iterator[str]:
    """Yield the paths of the Python modules."""
    graph = grimp.build_graph(_PACKAGE, "tests", "hls", cache_dir=None)
    own = [folder.replace("/", ".") for folder in TESTS]
    stack = [name for name in graph.modules if name.startswith((*own, *_WING))]
    stack += [
        user for name in stack if name.startswith(_WING[0]) for user in graph.find_modules_that_directly_import(name)
    ]
    found: set[str] = set()
    while stack:
        name = stack.pop()
        if name in found:
            continue
        found.add(name)
        parent = name.rpartition(".")[0]
        stack += [parent] if parent else []
        if name.startswith(_WING) or name.split(".")[:2] not in [[_PACKAGE, room] for room in _ABOVE]:
            stack += graph.find_modules_directly_imported_by(name)
    for name in found:
        path = Path(*name.split("."))
        path = path / "__init__.py" if (root / path).is_dir() else path.with_suffix(".py")
        yield path.as_posix()


def _sources(root: Path) -> Iterator[str]:
    """Yield the paths of the core's files."""
    rooms, stack = {"module"}, ["card"]
    while stack:
        room = stack.pop()
        if room not in rooms:
            rooms.add(room)
            included = (name for path in files(root / SOURCES / room) for _, name in includes(path, root))
            stack += [name.split("/")[0] for name in included if name is not None]
    return (path.relative_to(root).as_posix() for room in rooms for path in files(root / SOURCES / room))


def _base(root: Path) -> str | None:
    """Return the merge base with the last landed commit; None if that is unknown, or is the current commit."""
    head = _git(root, "rev-parse", "HEAD")
    landed = _git(root, "merge-base", "HEAD", "origin/main") or _git(root, "merge-base", "HEAD", "main")
    return None if landed == head else landed


def _changed(root: Path, base: str) -> list[str] | None:
    """Return the paths that differ from the base, also those that git does not know yet; None if git fails."""
    differing = _git(root, "diff", "--name-only", "--no-renames", "-z", base)
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return None if differing is None or new is None else sorted({*differing.split("\0"), *new.split("\0")} - {""})


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git; None if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
