"""Knows which tests reach a line of Python or a mutant in C++, and how long they take."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import coverage

from tools.mutants.scratch import Scratch
from tools.mutants.sites import Site

KEPT = 200
"""Tests that are kept of each line."""
_SETTINGS = """
[run]
source = {source}
parallel = true
data_file = {folder}/data
plugins = mutants_hook
patch = _exit, fork
disable_warnings = no-data-collected, module-not-imported, module-not-measured, couldnt-parse, already-imported
"""


@dataclass
class SuiteMap:
    """What a run of the tests told.

    Attributes:
        commit: What was checked out.
        tests: Names of the tests that passed.
        seconds: How long each took.
        lines: Tests that run a line, by file and line.
        native: Tests that reach a mutant in C++, by the mutant's id.
    """

    commit: str
    tests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    native: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, commit: str) -> SuiteMap:
        """Read a map of this commit."""
        known = cls(**json.loads(gzip.decompress(path.read_bytes())))
        if known.commit != commit:
            raise SystemExit(f"Make a new map: {path} is of {known.commit[:12]}, and {commit[:12]} is checked out.")
        return known

    def save(self, path: Path) -> None:
        """Write a map, compressed."""
        path.write_bytes(gzip.compress(json.dumps(asdict(self)).encode()))

    def learn(self, events: Iterable[dict[str, object]]) -> dict[str, int]:
        """Add the tests that passed, and return the number of each by its name."""
        times: defaultdict[str, float] = defaultdict(float)
        wrong = set()
        for event in events:
            times[str(event["test"])] += float(str(event["seconds"]))
            if event["outcome"] not in ("started", "passed"):
                wrong.add(event["test"])
        numbers = {name: number for number, name in enumerate(self.tests)}
        for name in times:
            if name not in wrong and name not in numbers:
                numbers[name] = len(self.tests)
                self.tests.append(name)
                self.seconds.append(round(times[name], 3))
        return {name: number for name, number in numbers.items() if name not in wrong}

    def tests_of(self, site: Site) -> list[str]:
        """Return the tests that reach a mutant, so that the first ones differ.

        The quickest function of each file comes first, then the second ones, each with its quickest case; then all
        with their second case.
        """
        lines = self.lines.get(site.file, {})
        reached = {test for line in range(site.lines[0], site.lines[1] + 1) for test in lines.get(str(line), ())}
        return [self.tests[test] for test in self._ordered(reached | set(self.native.get(site.id, ())))]

    def _ordered(self, tests: Iterable[int]) -> list[int]:
        cases: Counter[str] = Counter()
        of_file: Counter[tuple[str, int]] = Counter()
        places = []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            function = self.tests[test].partition("[")[0]
            group = function.partition("::")[0], cases[function]
            places.append((cases[function], of_file[group], self.seconds[test], test))
            cases[function] += 1
            of_file[group] += 1
        return [place[-1] for place in sorted(places)]

    def chosen(self, names: Sequence[str], most: int, seconds: float) -> list[str]:
        """Return the first tests that take no longer than this together, file by file, quick files first."""
        times = dict(zip(self.tests, self.seconds, strict=True))
        of_file: defaultdict[str, list[str]] = defaultdict(list)
        left = seconds
        for name in names[:most]:
            if times[name] <= left or not of_file:
                of_file[name.partition("::")[0]].append(name)
                left -= times[name]
        files = sorted(of_file.values(), key=lambda names: sum(times[name] for name in names))
        return [name for file in files for name in file]

    def add_python(self, scratch: Scratch, source: str, options: Sequence[str]) -> None:
        """Run tests with coverage, which says for each line which tests run it, in processes that they start, too."""
        with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
            settings = Path(folder, "settings")
            settings.write_text(_SETTINGS.format(source=scratch.folder / source, folder=folder))
            told = scratch.pytest(*options, COVERAGE_PROCESS_START=str(settings))
            numbers = self.learn(told.events)
            whole = coverage.Coverage(config_file=False, data_file=f"{folder}/data")
            whole.combine([folder], keep=False)
            data = whole.get_data()
            for file in sorted(data.measured_files()):
                lines = self.lines.setdefault(Path(file).relative_to(scratch.folder).as_posix(), {})
                for line, contexts in data.contexts_by_lineno(file).items():
                    reached = {numbers[context] for context in contexts if context in numbers}
                    if reached:
                        lines[str(line)] = self._ordered(reached | set(lines.get(str(line), ())))[:KEPT]

    def add_native(self, scratch: Scratch, sites: Sequence[Site | None], options: Sequence[str]) -> None:
        """Run tests on a build with all mutants, which note what tests reach them, and are not run."""
        with tempfile.NamedTemporaryFile("r") as trace:
            told = scratch.pytest(*options, MUTANT_TRACE=trace.name)
            numbers = self.learn(told.events)
            reached: defaultdict[str, set[int]] = defaultdict(set)
            for line in trace.read().splitlines():
                mutant, _, test = line.rpartition(" (")[0].partition(" ")
                if (site := sites[int(mutant)]) and test in numbers:
                    reached[site.id].add(numbers[test])
        self.native |= {name: self._ordered(tests) for name, tests in reached.items()}
