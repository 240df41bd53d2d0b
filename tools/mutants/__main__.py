"""Measures what the tests find, by mutants: small changes of the code that some test has to fail for.

    python -m tools.mutants choose --seed 1 --mutants MUTANTS
    python -m tools.mutants map --map MAP --mutants MUTANTS        # runs the tests: which of them reach which mutant
    python -m tools.mutants run --map MAP --mutants MUTANTS --out RESULTS
    python -m tools.mutants compare BEFORE AFTER              # two files of results; 1 if fewer mutants are caught

What runs is the last commit, in a copy of the tree that is kept for the next run (``--scratch``); the tree is only
read. After the tests or the code have changed, make a new map of the same mutants, and run them: they are found again
by function and text, wherever these have moved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tools.house import git
from tools.mutants.cpp import cpp_sites
from tools.mutants.scratch import NATIVE, Scratch
from tools.mutants.sites import Index, Site, python_sites
from tools.mutants.suite_map import SuiteMap

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_smartinfinity"
CAUGHT = ("caught", "timeout")


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands."""
    given = _parser().parse_args(arguments)
    return int(given.command(given) or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)

    def command(function: Any, *files: str) -> argparse.ArgumentParser:
        found = commands.add_parser(function.__name__, help=function.__doc__.splitlines()[0])
        found.set_defaults(command=function)
        for name in files:
            found.add_argument(f"--{name}", type=Path, required=True)
        if function is not compare:
            found.add_argument("--tree", type=Path, default=ROOT, help="a checkout (default: this one)")
            found.add_argument("--package", default=PACKAGE, help=argparse.SUPPRESS)
            found.add_argument("--scratch", type=Path, help="folder of copies (default: one of the tree in /tmp)")
        return found

    choosing = command(choose, "mutants")
    choosing.add_argument("--seed", type=int, required=True)
    choosing.add_argument("--python", type=int, default=120, help="mutants in Python (default: 120)")
    choosing.add_argument("--cpp", type=int, default=30, help="mutants in C++ (default: 30)")
    mapping = command(map, "map", "mutants")
    mapping.add_argument("-n", type=int, default=4, help="processes of pytest (default: 4)")
    mapping.add_argument("tests", nargs="*", help="folders or files (default: all)")
    running = command(run, "map", "mutants", "out")
    running.add_argument("--only", nargs="+", help="ids")
    running.add_argument("-n", type=int, default=1, help="mutants at a time (default: 1)")
    running.add_argument("--most", type=int, default=100, help="tests of a mutant (default: 100)")
    running.add_argument("--limit", type=float, default=300, help="seconds of a mutant (default: 300)")
    comparing = command(compare)
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    return parser


def choose(given: argparse.Namespace) -> None:
    """Choose mutants by a seed."""
    sites = list(_sites(given))
    index, rng = Index(sites), random.Random(given.seed)
    python, native = ([site for site in sites if site.file.endswith(".py") == wanted] for wanted in (True, False))
    chosen = [*index.choose(given.cpp, rng, native), *index.choose(given.python, rng, python)]
    given.mutants.write_text(json.dumps([site.record() for site in chosen], indent=1) + "\n")
    _say(f"{len(chosen)} mutants")


def map(given: argparse.Namespace) -> None:
    """Run the tests and write which of them reach which mutant."""
    known, scratch = SuiteMap(_commit(given)), _scratch(given)
    sites = _found(given)
    scratch.build(sites)
    spread = ["-n", str(given.n), "--dist", "loadfile", "--no-loadscope-reorder"] if given.n > 1 else []
    known.add(scratch, sites, [*spread, *given.tests])
    known.save(given.map)
    _say(f"{len(known.tests)} tests passed and reach {len(known.reached)} of {len(sites)} mutants")


def run(given: argparse.Namespace) -> None:
    """Run the tests of each mutant; results are added to those that are there."""
    given.out.touch()
    done = {json.loads(line)["id"] for line in given.out.read_text().splitlines()}
    records, sites = _records(given), _found(given)
    scratch, known = _scratch(given), SuiteMap.load(given.map, _commit(given))
    refused = scratch.build(sites)
    judge = Judge(scratch, known, given)
    with ThreadPoolExecutor(given.n) as pool:
        judged = {}
        for number, (record, site) in enumerate(zip(records, sites, strict=True)):
            if record["id"] in done or (given.only and record["id"] not in given.only):
                continue
            if site is None or number in refused:
                _note(given.out, record, {"outcome": "refused by the compiler" if site else "gone"})
            else:
                judged[pool.submit(judge.result, site, None if _is_python(record) else number)] = record
        try:
            for each in as_completed(judged):
                _note(given.out, judged[each], each.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _is_python(record: dict[str, Any]) -> bool:
    return str(record["file"]).endswith(".py")


def _records(given: argparse.Namespace) -> list[dict[str, Any]]:
    return json.loads(given.mutants.read_text())  # type: ignore[no-any-return]


def _found(given: argparse.Namespace) -> list[Site | None]:
    """Return the site of each mutant of the file, or None if it is gone."""
    index = Index(_sites(given))
    return [index.find(record) for record in _records(given)]


def _note(out: Path, record: dict[str, Any], told: dict[str, Any]) -> None:
    """Append a result to the file of results, and print it."""
    what = f"{record['file']}: {record['function']}: {record['change']}"
    with out.open("a") as file:
        file.write(json.dumps({"id": record["id"], **told, "what": what}) + "\n")
    _say(f"{record['id']} {told['outcome']} {told.get('seconds', 0)} s  {told.get('test', '')}")


class Judge:
    """Runs mutants, and runs the tests that fail without them, too: those would fail for any."""

    def __init__(self, scratch: Scratch, known: SuiteMap, given: argparse.Namespace) -> None:
        self._scratch, self._known = scratch, known
        self._most, self._limit = given.most, given.limit
        self._sound: set[str] = set()

    def result(self, site: Site, number: int | None) -> dict[str, Any]:
        """Return what is to be written of a mutant, by its number in the build if it is one in C++."""
        begin = time.monotonic()
        tests = self._known.chosen(self._known.tests_of(site), self._most, self._limit / 3)
        outcome, test = ("survived" if tests else "unreached"), ""
        with tempfile.NamedTemporaryFile(suffix=".py") as changed:
            environment = {"MUTANT": str(number)}
            if number is None:
                original = self._scratch.folder / site.file
                changed.write(site.applied(original.read_bytes()))
                changed.flush()
                environment = {"MUTANT_FILE": f"{original}{os.pathsep}{changed.name}"}
            while tests:
                told = self._scratch.pytest("-x", tests=tests, limit=self._limit, **environment)
                if told.outcome == "passed":
                    break
                concerned = [told.test] if told.test in tests else tests
                if self._passes(concerned):
                    outcome, test = ("timeout" if told.outcome == "timeout" else "caught"), told.test
                    break
                tests = [one for one in tests if one not in concerned]
                outcome = "survived" if tests else "undecided"
        seconds = round(time.monotonic() - begin, 1)
        return {"outcome": outcome, "test": test, "tests": len(tests), "seconds": seconds}

    def _passes(self, tests: list[str]) -> bool:
        """Return whether tests pass without the mutant."""
        if not self._sound.issuperset(tests):
            if self._scratch.pytest("-x", tests=tests, limit=self._limit).outcome != "passed":
                return False
            self._sound.update(tests)
        return True


def compare(given: argparse.Namespace) -> int:
    """Print which mutants were caught before and are not after; 1 if there are any."""
    before, after = (
        {told["id"]: told for told in (json.loads(line) for line in path.read_text().splitlines())}
        for path in (given.before, given.after)
    )
    lost: Counter[bool] = Counter()
    for name, told in before.items():
        now = after.get(name, {"outcome": "not run"})["outcome"]
        if told["outcome"] in CAUGHT and now not in CAUGHT:
            lost[now == "gone"] += 1
            _say(f"{name} {now}, was {told['outcome']} by {told['test']}: {told['what']}")
    caught = [sum(told["outcome"] in CAUGHT for told in each.values()) for each in (before, after)]
    _say(
        f"caught: {caught[0]} of {len(before)} before, {caught[1]} of {len(after)} after; "
        f"no longer caught: {lost[False]}; caught before, and their code is gone: {lost[True]}"
    )
    return int(lost[False] > 0)


def _commit(given: argparse.Namespace) -> str:
    """Return the commit that is checked out; the package has to be what it says."""
    if git(given.tree, "status", "--porcelain", given.package):
        raise SystemExit(f"Commit what has changed in {given.package}: mutants run on the last commit.")
    return git(given.tree, "rev-parse", "HEAD")[0]


def _sites(given: argparse.Namespace) -> Iterator[Site]:
    """Yield all sites of the package."""
    for file in sorted((given.tree / given.package).rglob("*.py")):
        yield from python_sites(given.tree, file)
    for file in sorted((given.tree / NATIVE / "src").rglob("*.[ch]pp")):
        if file.parent.name != "testing" and file.name != "bind_testing.cpp":
            yield from cpp_sites(given.tree, file)


def _scratch(given: argparse.Namespace) -> Scratch:
    tree = given.tree.resolve()
    name = f"mutants-{hashlib.sha256(str(tree).encode()).hexdigest()[:6]}"
    return Scratch(tree, (given.scratch or Path(tempfile.gettempdir(), name)).resolve())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
