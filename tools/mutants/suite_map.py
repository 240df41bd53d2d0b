"""Knows which tests reach which mutant, and how long they take."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.mutants.scratch import Scratch
from tools.mutants.sites import Site


@dataclass
class SuiteMap:
    """The results of one run of the tests.

    Attributes:
        commit: What was checked out.
        tests: Names of the tests that passed.
        seconds: How long each took.
        reached: Numbers of the tests that reach a mutant, by the mutant's id.
    """

    commit: str
    tests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reached: dict[str, list[int]] = field(default_factory=dict)

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
        """Keep the tests that passed, and return the number of each by its name."""
        times: defaultdict[str, float] = defaultdict(float)
        wrong = set()
        for event in events:
            times[str(event["test"])] += float(str(event["seconds"]))
            if event["outcome"] not in ("started", "passed"):
                wrong.add(event["test"])
        self.tests = [name for name in times if name not in wrong]
        self.seconds = [round(times[name], 3) for name in self.tests]
        return {name: number for number, name in enumerate(self.tests)}

    def tests_of(self, site: Site) -> list[str]:
        """Return the tests that reach a mutant, so that the first ones differ.

        The quickest function of each file comes first, then the second ones, each with its quickest case; then all
        with their second case.
        """
        return [self.tests[test] for test in self._ordered(self.reached.get(site.id, ()))]

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

    def add(self, scratch: Scratch, sites: Sequence[Site | None], options: Sequence[str]) -> None:
        """Run tests on a copy that notes which of them reach which mutant, in processes that they start, too."""
        with tempfile.NamedTemporaryFile("r") as trace, tempfile.NamedTemporaryFile("w") as lines:
            json.dump(scratch.lines_of(sites), lines)
            lines.flush()
            told = scratch.pytest(*options, MUTANT_TRACE=trace.name, MUTANT_LINES=lines.name)
            numbers = self.learn(told.events)
            reached: defaultdict[str, set[int]] = defaultdict(set)
            for line in trace.read().splitlines():
                mutant, _, test = line.rpartition(" (")[0].partition(" ")
                if (site := sites[int(mutant)]) and test in numbers:
                    reached[site.id].add(numbers[test])
        self.reached = {name: self._ordered(tests) for name, tests in reached.items()}
