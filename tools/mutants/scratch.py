"""Keeps a copy of the committed tree, with an environment of its own, in which mutants run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.mutants import cpp
from tools.mutants.sites import Site

HOOK = Path(__file__).with_name("hook.py")
NATIVE = Path("lightning_smartinfinity/native")
OUTER = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_")
"""Variables of a test that calls the tool, which are not for the tests that it runs."""
NO_TESTS = 5
"""The status with which pytest ends if it finds no test."""
LEFT_BYTES = 2 << 30
"""A mutant that leaves less memory or disk than this is stopped."""


@dataclass(frozen=True)
class Ended:
    """How tests ended: "passed", "failed" or "timeout", the test that failed or ran last, and the events of each."""

    outcome: str
    test: str
    events: list[dict[str, object]]


class Scratch:
    """A clone of the tree's last commit; the tree itself is only read."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._tree = tree
        self.folder = folder

    def prepare(self) -> None:
        """Check out the tree's commit and copy its environment. Builds that are there stay."""
        if not (self.folder / ".git").exists():
            _run("git", "clone", "--quiet", "--shared", "--no-checkout", self._tree, self.folder)
        _run("git", "-C", self.folder, "fetch", "--quiet", self._tree, "HEAD")
        _run("git", "-C", self.folder, "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
        _run("git", "-C", self.folder, "clean", "--quiet", "--force", "-d")
        if (self._tree / ".venv").exists():
            shutil.rmtree(self.folder / ".venv", ignore_errors=True)
            _run("cp", "--archive", "--link", self._tree / ".venv", self.folder / ".venv")
            self._move_environment()

    def _move_environment(self) -> None:
        """Let the copied environment name this folder where it named the tree's; its files are links so far."""
        packages = self._packages()
        for file in (*self.folder.glob(".venv/bin/*"), self.folder / ".venv/pyvenv.cfg", *packages.glob("*editable*")):
            if file.is_file() and not file.is_symlink() and str(self._tree).encode() in (old := file.read_bytes()):
                mode = file.stat().st_mode
                file.unlink()
                file.write_bytes(old.replace(str(self._tree).encode(), str(self.folder).encode()))
                file.chmod(mode)
        shutil.copy(HOOK, packages / "mutants_hook.py")
        (packages / "mutants_hook.pth").write_text("import mutants_hook\n")

    def _packages(self) -> Path:
        return next(self.folder.glob(".venv/lib/python*/site-packages"))

    def build(self, sites: Sequence[Site | None]) -> set[int]:
        """Check out the tree and build the core with the mutants in C++, of which ``MUTANT`` chooses one.

        Nothing is built if no mutant is in C++, or if the last build had the same.

        Returns:
            Numbers of the mutants that the compiler refuses.
        """
        sites = [site if site and not site.file.endswith(".py") else None for site in sites]
        if not any(sites):
            self.prepare()
            return set()
        stamp = self.folder / "build/mutants.json"
        commit = _run("git", "-C", self._tree, "rev-parse", "HEAD")
        wanted = [commit, *(site.id if site else None for site in sites)]
        if stamp.exists() and (built := json.loads(stamp.read_text()))["wanted"] == wanted:
            return set(built["refused"])
        out: set[int] = set()
        while True:
            self.prepare()
            kept = [None if number in out else site for number, site in enumerate(sites)]
            cpp.write_switches(self.folder, NATIVE / "src", kept)
            build = self.folder / "build/mutants"
            python = self.folder / ".venv/bin/python"
            options = {
                "CMAKE_MAKE_PROGRAM": self.folder / ".venv/bin/ninja",
                "CMAKE_UNITY_BUILD": "ON",
                "Python_EXECUTABLE": python,
                "SMART_INFINITY_TESTING": "ON",
                "nanobind_DIR": _run(python, "-m", "nanobind", "--cmake_dir"),
            }
            cmake = self.folder / ".venv/bin/cmake"
            _run(cmake, "-S", self.folder, "-B", build, "-G", "Ninja", *(f"-D{k}={v}" for k, v in options.items()))
            made = subprocess.run([cmake, "--build", build, "--target", "_core"], capture_output=True, text=True)
            if made.returncode == 0:
                break
            if not (more := set(cpp.refused(made.stdout + made.stderr, kept))):
                raise RuntimeError(made.stdout + made.stderr)
            out |= more
        for module in build.glob("_core*.so"):
            installed = self._packages() / NATIVE / module.name
            installed.unlink(missing_ok=True)
            shutil.copy(module, installed)
        stamp.write_text(json.dumps({"wanted": wanted, "refused": sorted(out)}))
        return out

    def lines_of(self, sites: Sequence[Site | None]) -> dict[str, list[tuple[int, int]]]:
        """Return line and number of each mutant in Python, by the path of its file in the copy."""
        lines: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, site in enumerate(sites):
            if site and site.file.endswith(".py"):
                lines[str((self.folder / site.file).resolve())].append((site.lines[0], number))
        return lines

    def pytest(self, *options: str, tests: Iterable[str] = (), limit: float | None = None, **environment: str) -> Ended:
        """Run tests of the copy, in this order, or those that the options name; without a limit pytest may print."""
        python = self.folder / ".venv/bin/python"
        with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as told:
            log, asked = Path(told, "log"), Path(told, "asked")
            log.touch()
            names = list(tests)
            if names:
                asked.write_text(json.dumps(names))
                environment |= {"MUTANT_TESTS": str(asked)}
                options += tuple(file for file in dict.fromkeys(name.split("::")[0] for name in names))
            shutil.copy(HOOK, Path(told, "mutants_hook.py"))
            variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | os.environ | environment
            variables = {name: variables[name] for name in variables if not name.startswith(OUTER)}
            if python.exists():
                variables |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": str(python.parents[1])}
            else:
                Path(told, "sitecustomize.py").write_text("import mutants_hook\n")
                variables |= {"PYTHONPATH": told}
            whole = ["-m", "pytest", "-q", "-p", "mutants_hook", "-p", "no:cacheprovider", f"--basetemp={told}/t"]
            output = subprocess.DEVNULL if limit else None
            process = subprocess.Popen(
                [python if python.exists() else sys.executable, *whole, *options],
                cwd=self.folder,
                env={**variables, "MUTANT_LOG": str(log)},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            in_time = _ends(process, limit, told)
            # What is killed may leave half a line.
            events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        failed = [str(event["test"]) for event in events if event["outcome"] == "failed"]
        last = (failed or [str(event["test"]) for event in events[-1:]] or [""])[0]
        passed = process.returncode in (0, NO_TESTS)
        return Ended("timeout" if not in_time else "passed" if passed else "failed", last, events)


def _ends(process: subprocess.Popen[bytes], limit: float | None, folder: str) -> bool:
    """Wait for a process, and kill it and all that it started if it takes too long or too much. Return whether not."""
    end = time.monotonic() + (limit or 1e9)
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
            return True
        left = min(psutil.virtual_memory().available, psutil.disk_usage(folder).free)
        if time.monotonic() > end or left < LEFT_BYTES:
            break
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return False


def _run(*command: str | Path) -> str:
    """Run a command and return what it prints."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
    return done.stdout.strip()
